"""Action spaces: rotations, what is relative to what, grippers, and the way back at deployment."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from made_datasets import write_fields

import rbtool
from rbtool.core.engine.tasks import ResultRefused
from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.preprocess.operations.program import ProgramProcessor, program_of
from rbtool.core.preprocess.processor import Block, BlockColumn, Context, Pieces
from rbtool.core.robots.action_space import FORMS, OF_CHUNKS, ChangeActionSpace, Group, Layout, Runs, rotation
from rbtool.core.robots.deployment import ActionMapping
from rbtool.core.ted.schema import Field, role_of
from rbtool.core.testing.operations import OperationTests, sample_block

EULER = [f"euler-{''.join(order)}" for axes in ("xyz", "XYZ") for order in itertools.permutations(axes)]
ROTATIONS = ["axis-angle", "quat-wxyz", "quat-xyzw", "6d-rows", "6d-columns", "matrix", *EULER, "euler-zyx-deg"]

# Rotations, compared with products of the plain matrices.


def turn(axis, angle):
    """The rotation about one axis, as it is in textbooks."""
    c, s = math.cos(angle), math.sin(angle)
    return np.array({"x": [[1, 0, 0], [0, c, -s], [0, s, c]], "y": [[c, 0, s], [0, 1, 0], [-s, 0, c]],
                     "z": [[c, -s, 0], [s, c, 0], [0, 0, 1]]}[axis])  # fmt: skip


def about(axis, angle):
    """The formula of Rodrigues."""
    x, y, z = axis
    k = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + math.sin(angle) * k + (1 - math.cos(angle)) * k @ k


ANGLES = st.floats(-math.pi, math.pi)
UNIT = st.tuples(*[st.floats(-1, 1)] * 3).map(np.array).filter(lambda v: np.linalg.norm(v) > 0.1)
UNIT = UNIT.map(lambda v: v / np.linalg.norm(v))


@given(st.tuples(ANGLES, ANGLES, ANGLES), st.permutations("xyz"))
def test_euler_angles_are_turns_one_after_another(angles, order):
    first, second, third = (turn(axis, angle) for axis, angle in zip(order, angles, strict=True))
    name, rows = "".join(order), np.array([angles])
    np.testing.assert_allclose(rotation(f"euler-{name}").matrix(rows)[0], third @ second @ first, atol=1e-12)
    np.testing.assert_allclose(rotation(f"euler-{name.upper()}").matrix(rows)[0], first @ second @ third, atol=1e-12)
    degrees = rotation(f"euler-{name}-deg").matrix(np.degrees(rows))[0]
    np.testing.assert_allclose(degrees, third @ second @ first, atol=1e-12)


@given(UNIT, ANGLES)
def test_axis_angle_and_quaternions_are_those_of_textbooks(axis, angle):
    expected = about(axis, angle)
    np.testing.assert_allclose(rotation("axis-angle").matrix(np.array([axis * angle]))[0], expected, atol=1e-12)
    wxyz = np.array([math.cos(angle / 2), *(axis * math.sin(angle / 2))])
    np.testing.assert_allclose(rotation("quat-wxyz").matrix(wxyz[None])[0], expected, atol=1e-12)
    np.testing.assert_allclose(rotation("quat-xyzw").matrix(wxyz[None, [1, 2, 3, 0]])[0], expected, atol=1e-12)


def test_six_numbers_are_two_rows_or_two_columns():
    matrix = about(np.array([0.6, 0.0, 0.8]), 0.7)[None]
    np.testing.assert_array_equal(rotation("6d-rows").numbers(matrix)[0], [*matrix[0, 0], *matrix[0, 1]])
    np.testing.assert_array_equal(rotation("6d-columns").numbers(matrix)[0], [*matrix[0, :, 0], *matrix[0, :, 1]])
    np.testing.assert_array_equal(rotation("matrix").numbers(matrix)[0], matrix.reshape(9))


SPECIAL = [((1, 0, 0), 0.0), ((0, 1, 0), math.pi), ((0, 1, 0), math.pi / 2), ((0, 0, 1), -math.pi / 2)]
SPECIAL += [((0.6, 0.8, 0), 1e-9), ((0, 0.6, 0.8), math.pi)]


@pytest.mark.parametrize("how", ROTATIONS)
@given(UNIT, ANGLES)
def test_matrices_come_back_from_each_representation(how, axis, angle):
    matrices = np.array([about(a, t) for a, t in [(axis, angle), *SPECIAL]])
    written = rotation(how).numbers(matrices)
    assert written.shape == (len(matrices), rotation(how).width)
    np.testing.assert_allclose(rotation(how).matrix(written), matrices, atol=1e-7)


# Groups: forward and back, for all kinds, forms and representations.


def chunk_of(kind, how, rng, *lead):
    """Random values of a group, absolute: a rotation in `how`, a position, or numbers."""
    if kind == "numbers":
        return rng.normal(size=(*lead, 4))
    quaternions = rng.normal(size=(*lead, 4))
    turned = rotation(how).numbers(rotation("quat-wxyz").matrix(quaternions))
    return turned if kind == "rotation" else np.concatenate([rng.normal(size=(*lead, 3)), turned], -1)


def same(kind, how, a, b):
    """How far values are apart, rotations as matrices: quaternions have two signs."""
    if kind == "numbers":
        return np.abs(a - b).max()
    at = 3 if kind == "pose" else 0
    turned = np.abs(rotation(how).matrix(a[..., at:]) - rotation(how).matrix(b[..., at:])).max()
    return max(turned, np.abs(a[..., :at] - b[..., :at]).max(initial=0))


def space_of(*texts, **widths):
    return ActionMapping((Layout.of("action", texts, {"action": widths.pop("action"), **widths}, {}),))


@pytest.mark.parametrize("kind", ["numbers", "rotation", "pose"])
@pytest.mark.parametrize("form", FORMS)
@given(st.sampled_from(ROTATIONS), st.sampled_from(ROTATIONS), st.sampled_from(ROTATIONS),
       st.sampled_from(["body", "world"]), st.integers(0, 2**32), st.booleans())  # fmt: skip
def test_inverse_undoes_forward(kind, form, given_as, made_as, state_as, frame, seed, single):
    rng = np.random.default_rng(seed)
    lead, length = (5,), () if single or form == "step" else (7,)
    actions, states = chunk_of(kind, given_as, rng, *lead, *length), chunk_of(kind, state_as, rng, *lead)
    turns = f",from={given_as},to={made_as},state-from={state_as}" if kind != "numbers" else ""
    text = f"0:{actions.shape[-1]}={kind}{turns},as={form},frame={frame},state=state"
    space = space_of(text, action=actions.shape[-1], state=states.shape[-1])
    assert Group.parsed(space.steps[0].groups[0].text) == space.steps[0].groups[0]
    learned = space.forward(actions, states)
    assert same(kind, given_as, space.inverse(learned, states), actions) < 1e-6
    back = space.steps[0].inverted()  # the text of the way back does the same
    undo = space_of(*(group.text for group in back.groups), action=back.width, state=states.shape[-1])
    assert same(kind, given_as, undo.forward(learned, states), actions) < 1e-6


def pose(position, matrix):
    found = np.eye(4)
    found[:3, :3], found[:3, 3] = matrix, position
    return found


@given(st.integers(0, 2**32))
def test_relative_actions_are_what_the_formulas_say(seed):
    rng = np.random.default_rng(seed)
    actions, state = chunk_of("pose", "axis-angle", rng, 6), chunk_of("pose", "axis-angle", rng)
    turns = rotation("axis-angle").matrix(actions[:, 3:])
    now = rotation("axis-angle").matrix(state[None, 3:])[0]
    made = {}
    for form, frame in itertools.product(("relative", "chunk-delta"), ("body", "world")):
        text = f"0:6=pose,from=axis-angle,to=matrix,as={form},frame={frame},state=state"
        made[form, frame] = space_of(text, action=6, state=6).forward(actions, state)
    for k in range(6):
        seen = np.linalg.inv(pose(state[:3], now)) @ pose(actions[k, :3], turns[k])
        np.testing.assert_allclose(made["relative", "body"][k], [*seen[:3, 3], *seen[:3, :3].reshape(9)], atol=1e-9)
        world = [*(actions[k, :3] - state[:3]), *(turns[k] @ now.T).reshape(9)]
        np.testing.assert_allclose(made["relative", "world"][k], world, atol=1e-9)
        before, back = (actions[k - 1, :3], turns[k - 1]) if k else (state[:3], now)
        step = [*(actions[k, :3] - before), *(turns[k] @ back.T).reshape(9)]
        np.testing.assert_allclose(made["chunk-delta", "world"][k], step, atol=1e-9)
    joints = space_of("0:3=numbers,as=relative,state=state", action=4, state=3).forward(actions[:, :4], state[:3])
    np.testing.assert_allclose(joints, np.concatenate([actions[:, :3] - state[:3], actions[:, 3:4]], 1), atol=1e-12)


def test_grippers_are_scaled_turned_round_and_made_binary():
    numbers = np.array([[0.0], [0.2], [0.6], [1.0], [np.nan]])
    for bounds, expected in (("-1:1", [-1, -0.6, 0.2, 1, np.nan]), ("1:0", [1, 0.8, 0.4, 0, np.nan])):
        space = space_of(f"0=gripper,from=0:1,to={bounds}", action=1)
        np.testing.assert_allclose(space.forward(numbers)[:, 0], expected, atol=1e-12)
        np.testing.assert_allclose(space.inverse(space.forward(numbers)), numbers, atol=1e-12)
    binary = space_of("0=gripper,from=0:1,to=1:-1,binary", action=1)
    np.testing.assert_array_equal(binary.forward(numbers)[:, 0], [1, 1, -1, -1, np.nan])
    np.testing.assert_array_equal(binary.inverse(binary.forward(numbers))[:, 0], [0, 0, 1, 1, np.nan])


def test_signs_of_quaternions_never_jump_within_a_run():
    angles = np.linspace(0, 4 * math.pi, 60)
    rows = np.stack([np.cos(angles), 0 * angles, 0 * angles, np.sin(angles)], -1)
    rows[::3] *= -1
    layout = space_of("0:4=rotation,from=quat-wxyz,to=quat-xyzw", action=4).steps[0]
    found = layout.changed(rows, Runs.of([25, 0, 35]), lambda place: None)
    for run in (found[:25], found[25:]):
        assert ((run[1:] * run[:-1]).sum(-1) > 0).all()
        assert run[0, 3] >= 0
    np.testing.assert_allclose(np.abs((found[:, [3, 0, 1, 2]] * rows).sum(-1)), 1, atol=1e-12)


# The operation.

TEXTS = ("0=numbers,as=delta,state=observation[1]", "1=gripper,from=0:1,to=-1:1")


class TestChangeActionSpace(OperationTests):
    def operation(self):
        return ChangeActionSpace(TEXTS)


class TestChangePoses(OperationTests):
    def operation(self):
        return ChangeActionSpace(("0:3=rotation,from=euler-ZYX,to=quat-xyzw,as=delta,state=observation",), "turn")

    def rows(self):
        fields, block = sample_block()
        turns = np.random.default_rng(3).normal(size=(block.rows, 3))
        field = Field(("turn",), "float64", (3,), role_of(("turn",)))
        return (*fields, field), Block(block.columns | {("turn",): BlockColumn("float64", turns)}, block.pieces, 0)


def made_rows(texts, actions, states, lengths):
    """The actions of episodes of these lengths after the operation."""
    flags = {("next", name): np.zeros((len(actions), 1), bool) for name in ("done", "terminated")}
    held = {("action",): actions, ("observation", "state"): states, **flags}
    columns = {key: BlockColumn(values.dtype.name, values) for key, values in held.items()}
    fields = tuple(Field(key, one.dtype, one.values.shape[1:], role_of(key)) for key, one in columns.items())
    whole = [True] * len(lengths)
    block = Block(columns, Pieces.of(range(len(lengths)), lengths, whole, whole), 0)
    work = ProgramProcessor(program_of({"action_space": list(texts)}), fields)
    return work.load(Context(fields, None, 0)).apply(block).columns["action",].values


@pytest.mark.parametrize("was", ["delta", "step"])
@pytest.mark.parametrize("frame", ["body", "world"])
def test_deltas_begin_anew_in_each_episode_and_are_undone(was, frame):
    rng, lengths = np.random.default_rng(1), [4, 1, 6]
    actions, states = (chunk_of("pose", "euler-xyz", rng, 11) for _ in range(2))
    tail = f"state=observation.state,state-from=euler-xyz,frame={frame}"
    made = made_rows([f"0:6=pose,from=euler-xyz,to=6d-rows,as={was},{tail}"], actions, states, lengths)
    turned = rotation("euler-xyz").matrix(actions[:, 3:])
    of_states = rotation("euler-xyz").matrix(states[:, 3:])
    for row in range(11):
        first = was == "step" or row in (0, 4, 5)
        p, r = (states[row, :3], of_states[row]) if first else (actions[row - 1, :3], turned[row - 1])
        moved, step = actions[row, :3] - p, turned[row] @ r.T
        if frame == "body":
            moved, step = r.T @ moved, r.T @ turned[row]
        np.testing.assert_allclose(made[row], [*moved, *step[0], *step[1]], atol=1e-9)
    back = made_rows([f"0:9=pose,from=6d-rows,to=euler-xyz,was={was},{tail}"], made, states, lengths)
    assert same("pose", "euler-xyz", back, actions) < 1e-9


def test_numbers_between_groups_move_along_and_float32_stays():
    rng = np.random.default_rng(2)
    actions = rng.normal(size=(3, 7)).astype(np.float32)
    made = made_rows(["2:5=rotation,from=axis-angle,to=matrix"], actions, actions, [3])
    assert (made.dtype, made.shape) == (np.float32, (3, 13))
    np.testing.assert_array_equal(made[:, :2], actions[:, :2])
    np.testing.assert_array_equal(made[:, 11:], actions[:, 5:])


@each(
    ("texts", "words"),
    [
        (["0:6"], "'' is not a kind of group"),
        (["0:6=pse,from=matrix"], "did you mean 'pose'"),
        (["0:6=pose"], "from is missing"),
        (["0:6=pose,from=euler-xyx"], "a rotation cannot be 'euler-xyx'"),
        (["0:3=rotation,from=quat-xyzv"], "did you mean 'quat-xyzw'"),
        (["0:3=numbers,frm=matrix"], "an unknown option 'frm'; did you mean 'from'"),
        (["0:3=numbers,as=delt"], "expected one of absolute, delta"),
        (["0:3=numbers,as=delta"], "state is missing"),
        (["0:3=numbers,as=delta,state=observation.stat"], "did you mean 'observation.state'"),
        (["0:3=numbers,as=delta,state=observation.state[0:2]"], "has 2 numbers, but action\\[0:3\\] has 3"),
        (["0:7=pose,from=euler-xyz"], "has 7 numbers, but a pose in euler-xyz has 6"),
        (["0:9=numbers"], "goes beyond the 7 numbers of action"),
        (["3:3=numbers"], "is an empty range"),
        (["0:4=numbers", "3:6=numbers"], "overlap"),
        (["6=gripper,from=0:1"], "from and to go together"),
        (["6=gripper,from=0:1,to=1:1"], "a gripper is '1:1'"),
        (["6=gripper,from=0:1,to=-1:1,binary=no"], "'binary=no' is not understood"),
        (["6=gripper,as=delta,state=observation.state[6]"], "a gripper cannot become relative"),
        (["0:6=numbers,was=relative,state=observation.state[0:6]"], "rows of action are not in chunks"),
        (["x..yaw=numbers"], "no number of action is called 'x'"),
        (["control[0:2]=numbers"], "'control', which is not a field"),
    ],
)
def test_groups_that_make_no_sense_are_refused(texts, words):
    rows = np.zeros((2, 7))
    with pytest.raises(UsageError, match=words):
        made_rows(texts, rows, rows, [2])


def test_numbers_that_are_no_rotation_are_refused():
    rows = np.ones((2, 4))
    with pytest.raises(ResultRefused, match=r"action\[0:4\] is not a rotation in quat-wxyz everywhere: 1, 1, 1, 1"):
        made_rows(["0:4=rotation,from=quat-wxyz,to=matrix"], rows, rows, [2])


# Deployment and training, from a dataset.


@pytest.fixture
def robot(tmp_path):
    """A dataset of three episodes with poses and a gripper."""
    rng, episodes = np.random.default_rng(5), []
    for length in (9, 12, 5):
        poses = np.cumsum(rng.normal(size=(length + 1, 6)) * 0.2, 0).astype(np.float32)
        actions = np.concatenate([poses[1:] + 0.01, rng.random((length, 1))], 1).astype(np.float32)
        episodes.append({"observation.state": poses, "action": actions, "reward": np.ones(length)})
    return write_fields(tmp_path / "robot", *episodes)


POSE = "0:6=pose,from=axis-angle,to=6d-rows,state=observation.state"


def changed(robot, name, **operations):
    dest = robot.parent / name
    rbtool.preprocess(robot, None, dest, operations=operations, num_workers=0)
    return dest


@pytest.mark.parametrize(("bounds", "width"), [("0:1", 1), ("1:0", 1), ("100:-20", 1), ("0:1", 2)])
def test_a_moving_gripper_has_the_state_that_it_arrives_at(bounds, width):
    """As Octo and OpenVLA prepare Open X-Embodiment: binarised backwards in time, in each episode."""
    start, stop = map(float, bounds.split(":"))
    shares = np.array([0.0, 0.3, 0.96, 0.7, 0.02, 0.4, 0.6, 0.4, 0.6, 1.0, 0.5])
    rows = np.repeat((start + shares * (stop - start))[:, None], width, 1)
    group = Group.parsed(f"0:{width}=gripper,from={bounds},to=-1:1,binary=next")
    found = group.changed(rows, Runs.of([6, 2, 3]), None)
    closed = [False, True, True, False, False, False, True, False, True, True, True]
    np.testing.assert_array_equal(found, np.repeat(np.where(closed, 1.0, -1.0)[:, None], width, 1))
    assert Group.parsed(group.text) == group
    with pytest.raises(UsageError, match="'binary=often' is not understood"):
        Group.parsed("0=gripper,from=0:1,to=-1:1,binary=often")


@pytest.mark.parametrize("form", OF_CHUNKS)
def test_windows_become_relative_to_the_sampled_step(robot, form):
    path = changed(robot, "made", action_space=[f"{POSE},as={form}", "6=gripper,from=0:1,to=-1:1"])
    space = rbtool.action_space(path)
    plain = rbtool.load_dataset(robot, windows={"action": (0, 4), "observation": (-1, 1)})[:]
    seen = rbtool.load_dataset(path, windows={"action": (0, 4), "observation": (-1, 1)}, transform=space.transform())[:]
    state = plain["observation", "state"][:, 1]  # of the step itself, the last of its window
    assert (seen["action"].shape, seen["action"].dtype) == ((26, 4, 10), torch.float32)
    torch.testing.assert_close(seen["action"], space.forward(plain["action"], state), atol=1e-5, rtol=0)
    again = space.inverse(seen["action"], state)
    torch.testing.assert_close(again[..., [0, 1, 2, 6]], plain["action"][..., [0, 1, 2, 6]], atol=1e-5, rtol=0)
    single = rbtool.load_dataset(path, transform=space.transform())[:]
    torch.testing.assert_close(single["action"], seen["action"][:, 0], atol=1e-6, rtol=0)
    loader = rbtool.torch_dataset(path, batch_size=5, windows={"action": (0, 4)}, transform=space.transform(), seed=0)
    batch = next(iter(loader))
    torch.testing.assert_close(batch["action"], seen["action"][batch["index"]], atol=1e-6, rtol=0)
    sampler = rbtool.StreamSampler(shuffle=True)
    stream = rbtool.load_dataset(
        path, 5, streaming=True, seed=0, sampler=sampler, windows={"action": (0, 4)}, transform=space.transform()
    )
    rows = []
    for batch in stream:
        rows += batch["index"].tolist()
        torch.testing.assert_close(batch["action"], seen["action"][batch["index"]], atol=1e-6, rtol=0)
    assert sorted(rows) == list(range(26))


def test_statistics_are_of_whole_relative_chunks(robot):
    space = rbtool.action_space(changed(robot, "made", action_space=f"{POSE},as=relative"))
    plain = rbtool.load_dataset(robot, windows={"action": (0, 4)})[:]
    whole = ~plain["is_pad", "action"].any(-1)
    chunks = space.forward(plain["action"][whole].double(), plain["observation", "state"][whole].double())
    found = space.statistics(4)
    assert found["count"] == len(chunks) == 26 - 3 * 3
    np.testing.assert_allclose(found["mean"], chunks.mean(0), atol=1e-6)
    np.testing.assert_allclose(found["std"], chunks.std(0, correction=0), atol=1e-6)
    np.testing.assert_allclose(found["max"], chunks.amax(0), atol=1e-6)
    assert found["q01"].shape == (4, 10)
    for name, fraction in (("q01", 0.01), ("q99", 0.99)):
        np.testing.assert_allclose(found[name], np.quantile(chunks, fraction, axis=0), atol=4e-3)
    with pytest.raises(UsageError, match="horizon is 100, but the longest episode has"):
        space.statistics(100)


def test_normalised_deltas_are_undone_step_by_step(robot):
    path = changed(robot, "made", action_space=f"{POSE},as=delta")
    scaled = rbtool.preprocess(path, None, robot.parent / "scaled", operations={"normalize": "action"}, num_workers=0)
    space = rbtool.action_space(scaled.path / ".rbtool/manifest.json")  # a manifest is enough
    rows, plain = rbtool.load_dataset(scaled.path)[:], rbtool.load_dataset(robot)[:]
    given = None
    for row in range(12):
        begins = row in (0, 9)
        given = space.inverse(
            rows["action"][row].double(), state=plain["observation", "state"][row].double(),
            previous=None if begins else given,
        )  # fmt: skip
        np.testing.assert_allclose(given, plain["action"][row], atol=1e-5)
    learned = space.forward(plain["action"][1], plain["observation", "state"][1], previous=plain["action"][0])
    torch.testing.assert_close(learned, rows["action"][1], atol=1e-4, rtol=0)


def test_the_manifest_records_groups_as_ranges_and_explains_them(robot):
    path = changed(robot, "made", action_space=["6:=gripper,from=0:1,to=1:0", f"{POSE},as=relative"])
    manifest = json.loads((path / ".rbtool/manifest.json").read_text())
    [operation] = manifest["provenance"][-1]["arguments"]["operations"]
    assert [text.split("=")[0] for text in operation["groups"]] == ["action[0:6]", "action[6:7]"]
    notes = [note for note in manifest["notes"] if note.startswith("action-space")]
    assert "action[0:6] stays absolute in the rows" in notes[0]
    assert "action[9:10]=gripper,from=1:0,to=0:1" in notes[1]


def test_metadata_about_the_old_actions_is_left_out():
    about = {"features": {"action": {"names": ["r", "p", "y"]}, "observation.state": {"names": ["a"]}}}
    documents = {"meta/info.json": json.dumps(about).encode(), "meta/stats.json": b"{}", "meta/modality.json": b"{}"}
    turned = ChangeActionSpace(("0:3=rotation,from=euler-xyz,to=axis-angle",)).documents(documents)
    assert turned.keys() == {"meta/info.json"}
    features = json.loads(turned["meta/info.json"])["features"]
    assert features == {"action": {"names": None}, "observation.state": {"names": ["a"]}}
    moved = ChangeActionSpace(("0:3=numbers,as=delta,state=observation.state[0:3]",)).documents(documents)
    assert moved == {"meta/info.json": documents["meta/info.json"]}


def test_an_action_space_that_cannot_be_undone_is_refused(robot):
    with pytest.raises(UsageError, match="no action space of"):
        rbtool.action_space(changed(robot, "plain", clip_reward="-9:9"))
    made = changed(robot, "made", action_space=f"{POSE},as=relative", normalize="action")
    with pytest.raises(UsageError, match="action was converted again after it became relative to chunks"):
        rbtool.action_space(made)
    made = changed(robot, "moved", action_space=f"{POSE},as=delta", rename="action=control")
    with pytest.raises(UsageError, match="action was changed by rename"):
        rbtool.action_space(made)


def test_actions_and_states_that_do_not_fit_are_refused():
    space = space_of("0:2=numbers,as=relative,state=state", "2=numbers,as=step,state=state[0]", action=3, state=2)
    with pytest.raises(UsageError, match="state is missing"):
        space.inverse(np.zeros(3))
    with pytest.raises(UsageError, match="expected 3 numbers in the last dimension"):
        space.inverse(np.zeros(4), np.zeros(2))
    with pytest.raises(UsageError, match="expected one for each action, or one for each chunk"):
        space.inverse(np.zeros((5, 3)), np.zeros((4, 2)))
    with pytest.raises(UsageError, match="need a state for each step of a chunk"):
        space.inverse(np.zeros((5, 3)), np.zeros(2))
    with pytest.raises(SchemaError, match="only a buffer can provide"):
        space.transform()({"action": np.zeros(3)})
