"""Inputs as cameras have them (bytes, channels last, views into larger pictures) give what numpy makes of them."""

import numpy as np
import pytest
from onnx import parser

from tunewright import Core, InputError, Preprocess, tools
from tunewright.devices.base import aligned
from tunewright.plugins.single import open_device

DEVICES = [d for d in ("CPU", "CPU.HOST") if d == "CPU.HOST" or open_device("CPU").family != "host"]
MEAN, SCALE = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
KERNEL = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)


def network(shape="n, 3, 9, 14", dtype="float", axis=1):
    """Something that adds up no channels, so that nothing of the input can hide."""
    return parser.parse_model(f"""
<ir_version: 10, opset_import: ["" : 20]>
g ({dtype}[{shape}] x) => ({dtype}[a, b, c, d] y) {{ t = Neg(x)  y = Concat<axis={axis}>(t, x) }}""")


def bytes_of(*shape, seed=1):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def both(x, axis=1):
    return np.concatenate([-x, x], axis)


def ready(x, reverse=False, mean=0.0, scale=1.0):
    """What the network is to see of an NHWC batch."""
    x = x[..., ::-1] if reverse else x
    x = x.transpose(0, 3, 1, 2).astype(np.float32)
    shape = (1, -1, 1, 1)
    return (x - np.float32(mean).reshape(shape)) / np.float32(scale).reshape(shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reverse", [False, True])
def test_bytes_with_channels_last(device, reverse):
    how = Preprocess(dtype="u8", layout="NHWC", mean=MEAN, scale=SCALE, reverse_channels=reverse)
    compiled = Core().compile_model(network(), device, preprocess={"x": how})
    assert str(compiled.inputs["x"]) == "uint8[n,9,14,3]"
    for batch in (1, 2):
        x = bytes_of(batch, 9, 14, 3)
        want = both(ready(x, reverse, MEAN, SCALE))
        np.testing.assert_allclose(compiled({"x": x})["y"], want, rtol=1e-6, atol=1e-6)
    with pytest.raises(InputError, match="uint8"):
        compiled({"x": x.astype(np.float32)})


@pytest.mark.parametrize("device", DEVICES)
def test_one_picture_without_a_batch(device):
    x = bytes_of(9, 14, 3)
    compiled = Core().compile_model(network(), device, preprocess=Preprocess(layout="HWC", scale=255))
    np.testing.assert_allclose(compiled({"x": x})["y"], both(ready(x[None], scale=255.0)), rtol=1e-6)
    compiled = Core().compile_model(network(), device, preprocess=Preprocess(layout="CHW"))
    np.testing.assert_array_equal(compiled({"x": x.transpose(2, 0, 1)})["y"], both(ready(x[None])))


def test_other_types_and_layouts():
    x = bytes_of(2, 3, 9, 14)
    for dtype in ("f32", np.int16, "float16"):
        compiled = Core().compile_model(network(), preprocess=Preprocess(dtype=dtype, layout="NCHW", mean=7))
        given = x.astype({"f32": np.float32}.get(dtype, dtype))
        np.testing.assert_array_equal(compiled({"x": given})["y"], both(x.astype(np.float32) - 7))
    half = Core().compile_model(network(dtype="float16"), preprocess=Preprocess(layout="NCHW", scale=255))
    got = half({"x": x})["y"]
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, both((x / np.float32(255)).astype(np.float16)))
    last = Core().compile_model(
        network("n, 9, 14, 3", axis=3), preprocess=Preprocess(model_layout="NHWC", mean=MEAN, reverse_channels=True)
    )
    x = bytes_of(2, 9, 14, 3)
    want = both(x[..., ::-1].astype(np.float32) - np.float32(MEAN), 3)
    np.testing.assert_allclose(last({"x": x})["y"], want, rtol=1e-6)
    as_it_is = Core().compile_model(network(dtype="int32"), preprocess=Preprocess())
    np.testing.assert_array_equal(as_it_is({"x": x})["y"], both(x.transpose(0, 3, 1, 2).astype(np.int32)))


def linear(x, height, width):
    """NHWC, as OpenCV's INTER_LINEAR but without rounding to bytes."""

    def places(have, want):
        at = np.clip((np.arange(want) + 0.5) * have / want - 0.5, 0, have - 1)
        low = np.minimum(at.astype(int), have - 1)
        return low, np.minimum(low + 1, have - 1), at - low

    (a, b, v), (c, d, h) = places(x.shape[1], height), places(x.shape[2], width)
    x = x.astype(np.float64)
    rows = x[:, a] * (1 - v)[:, None, None] + x[:, b] * v[:, None, None]
    return rows[:, :, c] * (1 - h)[:, None] + rows[:, :, d] * h[:, None]


@pytest.mark.parametrize("device", DEVICES)
def test_pictures_of_any_size(device):
    how = Preprocess(layout="HWC", resize="linear", mean=MEAN, reverse_channels=True)
    compiled = Core().compile_model(network(), device, preprocess={"x": how})
    assert str(compiled.inputs["x"]) == "uint8[x_height,x_width,3]"
    for size in ((20, 33), (9, 14), (5, 6)):
        x = bytes_of(*size, 3)
        want = both(ready(linear(x[None], 9, 14), True, MEAN))
        np.testing.assert_allclose(compiled({"x": x})["y"], want, rtol=1e-4, atol=1e-3)
    fixed = Core().compile_model(network(), device, preprocess=Preprocess(resize="nearest", size=(18, 28)))
    x = bytes_of(1, 18, 28, 3)
    np.testing.assert_array_equal(fixed({"x": x})["y"], both(ready(x[:, ::2, ::2])))


def test_the_model_stays_as_it_was():
    core = Core()
    model = core.read_model(network("1, 3, 9, 14"))
    before = str(model.graph)
    other = model.preprocess(Preprocess(scale=2))
    assert str(model.graph) == before and str(other.inputs["x"]) == "uint8[1,9,14,3]"
    wide = other.reshape({"x": [1, 9, 20, 3]})
    assert core.compile_model(wide)({"x": bytes_of(1, 9, 20, 3)})["y"].shape == (1, 6, 9, 20)


def test_an_input_that_is_an_output():
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
g (float[1, 3, 2, 2] x) => (float[1, 3, 2, 2] y) { y = Identity(x) }""")
    x = bytes_of(1, 2, 2, 3)
    np.testing.assert_array_equal(Core().compile_model(model, preprocess=Preprocess())({"x": x})["y"], ready(x))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (Preprocess(layout="WHC"), "not one of NHWC"),
        (Preprocess(model_layout="HWC"), "model_layout 'HWC'"),
        (Preprocess(dtype="u9"), "dtype 'u9'"),
        (Preprocess(mean=(1, 2)), "mean has 2 numbers for 3 channels"),
        (Preprocess(scale=0), "must be finite"),
        (Preprocess(mean="grey"), "neither a number"),
        (Preprocess(resize="bilinear"), "not one of linear"),
        (Preprocess(size=(4, 4)), "without resize"),
        (Preprocess(resize="linear", size=(4, 0)), "not a height and a width"),
    ],
)
def test_what_cannot_be(how, said):
    with pytest.raises(InputError, match=said):
        Core().read_model(network()).preprocess(how)


def test_what_a_model_cannot_take():
    core = Core()
    with pytest.raises(InputError, match="no input 'z'"):
        core.read_model(network()).preprocess({"z": Preprocess()})
    with pytest.raises(InputError, match="a fixed input size"):
        core.read_model(network("1, 3, h, w")).preprocess(Preprocess(resize="linear"))
    with pytest.raises(InputError, match="networks of floats"):
        core.read_model(network(dtype="int32")).preprocess(Preprocess(mean=3))
    with pytest.raises(InputError, match="not a batch of pictures"):
        core.read_model(
            parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
g (float[3, 4] x) => (float[3, 4] y) { y = Neg(x) }""")
        ).preprocess(Preprocess())
    with pytest.raises(InputError, match="a batch of 2"):
        core.read_model(network("2, 3, 9, 14")).preprocess(Preprocess(layout="HWC"))


def test_the_command_line(tmp_path, capsys):
    import onnx

    onnx.save(network(), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", bytes_of(20, 33, 3))
    how = "x=u8,hwc,reverse,resize=linear,mean=123.7:116.3:103.5,scale=57.4"
    arguments = ["run", str(tmp_path / "m.onnx"), "-i", f"x={tmp_path / 'x.npy'}", "-o", str(tmp_path / "out")]
    assert tools.execute([*arguments, "--preprocess", how]) == 0
    want = both(ready(linear(bytes_of(20, 33, 3)[None], 9, 14), True, MEAN, 57.4))
    np.testing.assert_allclose(np.load(tmp_path / "out" / "y.npy"), want, rtol=1e-4, atol=1e-3)
    for wrong in ("x=u9", "x=mean=a", "x=size=3xa"):
        assert tools.execute([*arguments, "--preprocess", wrong]) == 2
        assert "--preprocess" in capsys.readouterr().err


CONVOLUTION = f"""
<ir_version: 10, opset_import: ["" : 20]>
g (float[1, 3, 12, 20] x, float[7, 5] p) => (float[1, 4, 12, 20] y, float[7, 6] q)
<float[4, 3, 3, 3] w = {{{", ".join(map(str, KERNEL.ravel()))}}},
 float[5, 6] m = {{{", ".join(str(k) for k in range(30))}}}>
{{ y = Conv<pads=[1, 1, 1, 1]>(x, w)  q = MatMul(p, m) }}
"""


def at(array, offset):
    """A copy that begins so many bytes behind a multiple of 64."""
    memory = aligned(array.nbytes + offset)
    made = np.ndarray(array.shape, array.dtype, memory, offset)
    made[...] = array
    return made


@pytest.mark.parametrize("device", DEVICES)
def test_where_an_array_begins_does_not_matter(device):
    """Kernels read inputs where they are; numpy aligns its own to 16 bytes, and parts of arrays to their elements."""
    request = Core().compile_model(parser.parse_model(CONVOLUTION), device).create_infer_request()
    pictures = Core().compile_model(network("1, 3, 9, 14"), device, preprocess=Preprocess()).create_infer_request()
    rng = np.random.default_rng(3)
    x, p = rng.standard_normal((1, 3, 12, 20)).astype(np.float32), rng.standard_normal((7, 5)).astype(np.float32)
    want = request.infer({"x": x, "p": p})
    frame = bytes_of(1, 9, 14, 3)
    for offset in (0, 4, 8, 20, 36, 1, 2, 7):  # the last three: not even where a float may be
        got = request.infer({"x": at(x, offset), "p": at(p, offset)})
        for name in want:
            np.testing.assert_array_equal(got[name], want[name], err_msg=f"{name}, {offset} bytes off")
        np.testing.assert_array_equal(pictures.infer({"x": at(frame, offset)})["y"], both(ready(frame)))


@pytest.mark.parametrize("device", DEVICES)
def test_views_into_pictures(device):
    """A part of a picture, rows with padding, every second pixel, a mirrored one, read-only bytes."""
    request = Core().compile_model(network("1, 3, 9, 14"), device, preprocess=Preprocess(layout="HWC"))
    request = request.create_infer_request()
    frame = bytes_of(40, 60, 3)
    fixed = bytes_of(9, 14, 3)
    fixed.flags.writeable = False
    views = [
        frame[5:14, 7:21], frame[:9, :14], frame[::4, ::4][:9, :14], frame[8::-1, 13::-1], frame[:9, :14, ::-1],
        bytes_of(9, 16, 3)[:, :14], bytes_of(14, 9, 3).transpose(1, 0, 2), fixed,
    ]  # fmt: skip
    for view in views * 2:
        np.testing.assert_array_equal(request.infer({"x": view})["y"], both(ready(view[None])))
    request.set_tensor("x", frame[5:14, 7:21])
    for _ in range(2):  # a view that was set is read at each inference
        np.testing.assert_array_equal(request.infer()["y"], both(ready(frame[None, 5:14, 7:21])))
        frame[:] = bytes_of(40, 60, 3, seed=9)


def test_tensors_of_bytes():
    request = Core().compile_model(network("1, 3, 9, 14"), "CPU", preprocess=Preprocess()).create_infer_request()
    frame = request.get_tensor("x")
    assert frame.shape == (1, 9, 14, 3) and frame.dtype == np.uint8
    for seed in (1, 2):
        frame[:] = bytes_of(1, 9, 14, 3, seed=seed)
        request.start_async()
        assert request.wait()
        np.testing.assert_array_equal(request.results["y"], both(ready(frame)))


def test_bytes_are_not_copied(monkeypatch):
    """What lies in order goes to the kernels as it is."""
    request = Core().compile_model(network("1, 3, 9, 14"), "CPU", preprocess=Preprocess()).create_infer_request()
    seen = []
    run = request.executor.run
    monkeypatch.setattr(request.executor, "run", lambda *given: seen.append(given[1]) or run(*given))
    x = bytes_of(1, 9, 14, 3)
    for _ in range(2):  # checked, then as the last one
        request.infer({"x": x})
    assert all(values[0] is x for values in seen) and len(seen) == 2
