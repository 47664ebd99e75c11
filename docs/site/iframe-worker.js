/* Browsers start no worker on a page that is opened from the disk: one in a frame makes the search work there, too. */
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      const started = new Promise((done) => script.addEventListener("load", done));
      script.src = address;
      inside.document.body.append(script);
      this.postMessage = async (data) => {
        await started;
        inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      };
    }
  };
}
