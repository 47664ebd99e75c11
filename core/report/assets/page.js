"use strict";
(() => {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;

  /* Shows one frame of a sheet of one row. */
  const show = (frame, number) => {
    frame.firstElementChild.setAttribute("x", String(-number * Number(frame.dataset.width)));
  };

  /* Runs `step` several times a second while a button says so. */
  const clock = (button, step, playing) => {
    let timer = 0;
    const set = (on) => {
      clearInterval(timer);
      timer = on ? setInterval(() => { if (!step()) set(false); }, 125) : 0;
      button.textContent = on ? "Pause" : "Play";
    };
    button.addEventListener("click", () => set(!timer));
    set(playing);
    return set;
  };

  for (const strip of document.querySelectorAll(".strip")) {
    const frame = strip.querySelector(".frame"), button = strip.querySelector("button");
    let now = 0;
    button.hidden = false;
    clock(button, () => {
      now = (now + 1) % Number(frame.dataset.count);
      show(frame, now);
      return true;
    }, !still);
  }

  const text = (value) => typeof value === "number" ? String(Number(value.toPrecision(4))) : value;

  const prepare = (episode) => {
    const data = JSON.parse(episode.querySelector("script").textContent);
    const controls = episode.querySelector(".controls"), frame = episode.querySelector(".frame");
    const slider = controls.querySelector("input"), output = controls.querySelector("output");
    const lanes = [...episode.querySelectorAll(".lanes figure")].map((lane, place) => ({
      cursor: lane.querySelector(".cursor"), now: lane.querySelector(".now"), values: data.traces[place],
    }));
    const last = Math.max(1, Number(episode.dataset.last));
    const move = () => {
      const place = Number(slider.value), step = data.steps[place];
      for (const lane of lanes) {
        const x = String(1000 * step / last);
        lane.cursor.setAttribute("x1", x);
        lane.cursor.setAttribute("x2", x);
        lane.now.textContent = text(lane.values[place]);
      }
      let nearest = 0;
      while (nearest + 1 < data.frames.length && data.frames[nearest + 1] <= step) nearest += 1;
      if (frame) show(frame, nearest);
      const seen = frame ? `, frame of step ${data.frames[nearest]}` : "";
      output.textContent = `step ${step} of ${episode.dataset.last}${seen}`;
      slider.setAttribute("aria-valuetext", output.textContent);
    };
    const set = clock(controls.querySelector("button"), () => {
      if (Number(slider.value) >= Number(slider.max)) return false;
      slider.value = String(Number(slider.value) + 1);
      move();
      return true;
    }, false);
    controls.querySelector("button").addEventListener("click", () => {
      if (slider.value === slider.max) { slider.value = "0"; move(); set(true); }
    });
    slider.addEventListener("input", move);
    controls.hidden = false;
    move();
    return set;
  };

  for (const player of document.querySelectorAll(".player")) {
    const choice = player.querySelector(".choice"), select = choice.querySelector("select");
    const episodes = [...player.querySelectorAll(".episode")];
    const stops = episodes.map(prepare);
    const choose = () => {
      for (const set of stops) set(false);
      for (const episode of episodes) episode.hidden = episode.id !== select.value;
    };
    choice.hidden = episodes.length < 2;
    select.addEventListener("change", choose);
    choose();
  }

  /* On paper, everything is open. */
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
    opened = [];
  });
})();
