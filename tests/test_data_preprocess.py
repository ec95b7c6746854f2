"""Preprocessing: right numbers, fitted on training records only, and honestly marked."""

import numpy as np
import pytest

from silodp import registry
from silodp.data import STEPS, load_data
from silodp.data.images import in_parts
from silodp.data.preprocess import Step, apply_steps, parse_steps
from silodp.data.types import Table


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def regression(x, y=None, **more) -> Table:
    y = np.linspace(-2, 4, len(x)) if y is None else y
    return Table("made", np.asarray(x, np.float32), np.asarray(y, np.float32), **more)


def run(steps, train, test=None):
    return apply_steps(parse_steps(steps), train, test)


ARGUMENTS = {
    "divide": "2",
    "pca": "2",
    "one-hot": "a",
    "target-divide": "5",
    "encoder": "tests.test_data_preprocess:edges",
}
IMAGES = ("hog", "hog-colour", "scattering", "encoder")
FITTED_STEPS = {"standardise", "standardise-all", "pca", "one-hot", "target-max"}


def edges(images: np.ndarray) -> np.ndarray:
    """A small encoder."""
    return np.abs(np.diff(images, axis=1))


def company(images: np.ndarray) -> np.ndarray:
    """Not an encoder of single records."""
    return images - images.mean(axis=0)


def nowhere(images: np.ndarray) -> np.ndarray:
    return np.full((len(images), 2), np.inf)


@pytest.mark.parametrize("name", STEPS)
def test_mark_is_public_exactly_when_the_step_ignores_other_records(name, rng):
    """The mark is checked against behaviour: change one record, and look at the others."""
    text = f"{name}:{ARGUMENTS[name]}" if name in ARGUMENTS else name
    x = np.round(rng.normal(size=(8, 3)) * 3)
    outputs = []
    for last in (0, 50):
        x[-1] = last
        if name == "target-parity":
            table = Table("made", x.astype(np.float32), np.arange(8), classes=tuple("01234567"))
        elif name in IMAGES:
            table = regression(np.tile(x[:, :, None], (1, 4, 8))[:, :8] * np.arange(8))
        else:
            table = regression(x, [1, 2, 3, 4, 5, 6, 7, last], names=("a", "b", "c"))
        out, _, (note,) = run([text], table)
        outputs.append((out.features[:-1].tolist(), out.targets[:-1].tolist()))
    fitted = outputs[0] != outputs[1]
    assert note.public != fitted
    assert fitted == (name in FITTED_STEPS)


def test_standardise(rng):
    train = regression(rng.normal(5, 3, (200, 2, 3)))
    test = regression(rng.normal(9, 3, (50, 2, 3)))
    out, tested, _ = run(["standardise"], train, test)
    np.testing.assert_allclose(out.features.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(out.features.std(axis=0), 1, atol=1e-5)
    assert tested is not None
    expected = (test.features - train.features.mean(axis=0)) / train.features.std(axis=0)
    np.testing.assert_allclose(tested.features, expected, atol=1e-5)


def test_pieces_are_about_one_long_and_a_line_with_knots_is_linear_in_them(rng):
    x = rng.normal(size=(2000, 3))
    out, _, _ = run(["pieces:9"], regression(x))
    assert run(["pieces"], regression(x))[0].features.shape == (2000, 12)
    assert out.features.shape == (2000, 24)
    assert np.linalg.matrix_rank(out.features) == 24  # nothing is told twice: noise grows with features
    assert np.mean(np.sum(out.features**2, axis=1)) == pytest.approx(1, rel=0.05)
    near = np.clip(x[:, 0], -2.5, 2.5)
    bent = np.maximum(near, np.linspace(-2.5, 2.5, 9)[2])
    columns = np.column_stack([out.features, np.ones(2000)])
    np.testing.assert_allclose(columns @ np.linalg.lstsq(columns, bent, rcond=None)[0], bent, atol=1e-4)


def test_standardise_leaves_constant_columns_at_zero():
    x = np.column_stack([np.full(40, 1e6 + 0.1), np.zeros(40), np.arange(40), np.arange(40) / 1e9])
    out, _, _ = run(["standardise"], regression(x))
    np.testing.assert_array_equal(out.features[:, :2], 0)
    np.testing.assert_allclose(out.features[:, 2:].std(axis=0), 1, rtol=1e-5)


def test_standardise_with_public_constants(tmp_path, rng):
    train, path = regression(rng.normal(size=(9, 2))), tmp_path / "c.npz"
    np.savez(path, mean=[1.0, 2.0], std=[4.0, 5.0])
    out, _, notes = run([f"standardise:{path}"], train)
    np.testing.assert_allclose(out.features, (train.features - [1, 2]) / [4, 5], rtol=1e-6)
    assert notes[0].public
    for bad in ({"mean": [1.0], "std": [1.0]}, {"mean": [0, 0], "std": [1, 0]}, {"mean": [0, 0]}):
        np.savez(path, **bad)
        with pytest.raises(ValueError, match="mean and std > 0 of shape"):
            run([f"standardise:{path}"], train)


def test_standardise_all(rng):
    train = regression(rng.normal(5, 3, (50, 4)))
    out, _, _ = run(["standardise-all"], train)
    assert out.features.mean() == pytest.approx(0, abs=1e-5)
    assert out.features.std() == pytest.approx(1, abs=1e-5)
    out, _, notes = run(["standardise-all:0.5,2"], train)
    np.testing.assert_allclose(out.features, (train.features - 0.5) / 2, rtol=1e-6)
    assert notes[0].public


@pytest.mark.parametrize("width", [6, 80])
def test_pca_matches_an_eigendecomposition(width, rng):
    x = rng.normal(size=(300, width)) * np.linspace(1, 5, width)
    train, test = regression(x), regression(rng.normal(size=(7, width)))
    out, tested, notes = run(["pca:3"], train, test)
    values, axes = np.linalg.eigh(np.cov(x.T))
    assert tested is not None
    for k in range(3):
        projected = (test.features - x.mean(axis=0)) @ axes[:, -1 - k]
        np.testing.assert_allclose(np.abs(tested.features[:, k]), np.abs(projected), atol=1e-3)
        assert out.features[:, k].var(ddof=1) == pytest.approx(values[-1 - k], rel=1e-4)
    assert not notes[0].public


def test_normalise_bias_flatten_divide():
    x = np.array([[[3.0, 4.0]], [[0.0, 0.0]]])
    out, _, notes = run(["divide:2", "normalise", "flatten", "bias"], regression(x))
    np.testing.assert_allclose(out.features, [[0.6, 0.8, 1], [0, 0, 1]], rtol=1e-6)
    assert out.features.dtype == np.float32
    assert all(note.public for note in notes)


def test_one_hot_of_categories_and_of_numbers():
    x = [[0, 7, 1], [1, 9, 2], [0, 7, 3]]
    train = regression(x, names=("c", "n", "v"), categories={"c": ("p", "q", "r")})
    test = regression([[2, 8, 5]], names=train.names, categories=train.categories)
    out, tested, notes = run(["one-hot:c,n"], train, test)
    assert out.names == ("c=p", "c=q", "c=r", "n=7", "n=9", "v")
    np.testing.assert_array_equal(out.features[1], [0, 1, 0, 0, 1, 2])
    assert tested is not None
    np.testing.assert_array_equal(tested.features, [[0, 0, 1, 0, 0, 5]])
    assert not notes[0].public


def test_standardise_before_one_hot_leaves_codes_alone():
    x = [[0, 7], [1, 9], [2, 8]]
    train = regression(x, names=("c", "v"), categories={"c": ("p", "q", "r")})
    out, _, _ = run(["standardise", "one-hot:c"], train)
    np.testing.assert_array_equal(out.features[:, :3], np.eye(3))


def test_targets():
    train, test = regression(np.ones((3, 1)), [-4, 2, 1]), regression(np.ones((1, 1)), [8])
    out, tested, _ = run(["target-max"], train, test)
    np.testing.assert_array_equal(out.targets, [-1, 0.5, 0.25])
    assert tested is not None
    np.testing.assert_array_equal(tested.targets, [2])
    np.testing.assert_array_equal(run(["target-divide:2"], train)[0].targets, [-2, 1, 0.5])
    digits = Table("made", train.features, np.array([0, 1, 2]), classes=("3", "4", "8"))
    out, _, _ = run(["target-parity"], digits)
    np.testing.assert_array_equal(out.targets, [1, 0, 0])
    assert out.classes == ("even", "odd")


CATEGORIES = {"names": ("c", "v"), "categories": {"c": ("p", "q")}}


@pytest.mark.parametrize(
    ("step", "more", "told"),
    [
        ("scale", {}, "'scale': unknown; need one of flatten"),
        ("divide", {}, "needs 1 finite number"),
        ("divide:0", {}, "must not be 0"),
        ("divide:nan", {}, "needs 1 finite number"),
        ("standardise-all:1", {}, "needs 2 finite number"),
        ("standardise-all:1,0", {}, "deviation has to be positive"),
        ("standardise:gone.npz", {}, "no such file"),
        ("pca", {}, "from 1 to 2"),
        ("pca:3", {}, "from 1 to 2"),
        ("pca:x", {}, "from 1 to 2"),
        ("bias:2", {}, "takes no argument"),
        ("hog", {}, "needs images"),
        ("scattering", {}, "needs images"),
        ("encoder", {}, "name MODULE:FUNCTION, or an npz file"),
        ("encoder:gone.npz", {}, "no such file"),
        ("encoder:tests.nowhere:edges", {}, "cannot be imported"),
        ("encoder:tests.test_data_preprocess:company", {}, "change with the records beside it"),
        ("encoder:numpy:sum", {}, "gives float32 of shape"),
        ("encoder:tests.test_data_preprocess:nowhere", {}, "not finite"),
        ("pieces:7", {}, "needs a number of knots: one of 3, 5, 9, 17, 33, 65"),
        ("flatten:2", {}, "takes no argument"),
        ("one-hot", {}, "name the columns"),
        ("one-hot:z", {"names": ("a", "b")}, "'z' is not a column"),
        ("target-parity", {}, "whole numbers"),
        ("target-max", {"classes": ("a", "b")}, "is for regression"),
        ("target-divide:2", {"classes": ("a", "b")}, "is for regression"),
        ("flatten", CATEGORIES, "column 'c' holds categories; add the step 'one-hot:c'"),
        ("divide:2", CATEGORIES, "one-hot c first"),
        ("pca:1", CATEGORIES, "one-hot c first"),
    ],
)
def test_bad_steps(step, more, told):
    with pytest.raises(ValueError, match=told):
        run([step], regression([[0, 1], [1, 0], [1, 1]], **more))


def slow_hog(image: np.ndarray, cell: int, orientations: int) -> np.ndarray:
    """One image of shape (h, w, c), pixel by pixel."""
    h, w, _ = image.shape
    cells = np.zeros((orientations, h // cell, w // cell))
    for r, s in np.ndindex(h, w):
        across = image[r, s + 1] - image[r, s - 1] if 0 < s < w - 1 else np.zeros(image.shape[2])
        down = image[r + 1, s] - image[r - 1, s] if 0 < r < h - 1 else np.zeros(image.shape[2])
        best = np.argmax(across**2 + down**2)
        turn = np.arctan2(down[best], across[best]) / (2 * np.pi) * orientations
        for o, i, j in np.ndindex(*cells.shape):
            apart = abs(turn - o) % orientations
            near = [1 - min(apart, orientations - apart)]
            near += [1 - abs(at - ((k + 0.5) * cell - 0.5)) / cell for at, k in ((r, i), (s, j))]
            cells[o, i, j] += np.hypot(across[best], down[best]) * np.prod(np.maximum(near, 0))
    return np.sqrt(cells).ravel() / np.linalg.norm(np.sqrt(cells))


def test_oriented_gradients_are_those_of_the_definition_in_every_layout(rng):
    images = rng.normal(size=(3, 10, 9, 2)).astype(np.float32)
    expected = [slow_hog(image.astype(np.float64), 4, 8) for image in images]
    for layout in (images, np.moveaxis(images, 3, 1)):
        out, _, _ = run(["hog"], regression(layout))
        np.testing.assert_allclose(out.features, expected, atol=1e-5)
    grey, _, _ = run(["hog:3"], regression(images[..., 0]))
    np.testing.assert_allclose(grey.features, [slow_hog(i[..., :1].astype(float), 3, 8) for i in images], atol=1e-5)
    blank, _, _ = run(["hog"], regression(np.ones((2, 8, 8))))
    assert not blank.features.any()


@pytest.mark.parametrize("cell", ["0", "9", "2.5"])
def test_a_cell_fits_into_the_image(cell):
    with pytest.raises(ValueError, match="whole number of pixels from 1 to 8"):
        run([f"hog:{cell}"], regression(np.ones((2, 8, 8))))


def slow_scattering(image: np.ndarray) -> list[np.ndarray]:
    """Groups of one square layer with sides of 8: all sums written out, two scales, eight orientations."""
    padded = np.pad(image, 4, mode="symmetric")
    near = np.arange(-8, 8)

    def wavelet(j, o):
        rows, columns = np.meshgrid(near, near, indexing="ij")
        angle, width = np.pi * o / 8, 0.8 * 2**j
        along, across = columns * np.cos(angle) + rows * np.sin(angle), rows * np.cos(angle) - columns * np.sin(angle)
        bump = np.exp(-(along**2 + (across / 2) ** 2) / (2 * width**2))
        wave = bump * np.exp(1j * along * 3 * np.pi / 4 / 2**j)
        wave -= bump * wave.sum() / bump.sum()
        return wave / np.abs(wave).sum()

    def seen(x, filter):
        out = np.zeros(x.shape, complex)
        for (r, s), value in np.ndenumerate(filter):
            out += value * np.roll(x, (near[r], near[s]), (0, 1))
        return np.abs(out)

    def smoothed(x, j):
        places = np.arange(-4, 12, 2**j)
        weights = np.exp(-((places - np.array([[1.5], [5.5]])) ** 2) / (2 * 1.6**2))
        weights /= weights.sum(axis=1, keepdims=True)
        return weights @ x[:: 2**j, :: 2**j] @ weights.T

    fine, coarse = ([seen(padded, wavelet(j, o)) for o in range(8)] for j in (0, 1))
    both = [smoothed(seen(u, wavelet(1, o)), 1) for u in fine for o in range(8)]
    return [smoothed(padded, 0), [smoothed(u, 0) for u in fine], both, [smoothed(u, 1) for u in coarse]]


def test_scattering_is_that_of_the_definition_group_by_group(rng):
    image = rng.uniform(size=(8, 8))
    groups = []
    for group in map(np.ravel, slow_scattering(image)):
        groups.append((group - group.mean()) / group.std())
    expected = np.concatenate(groups) / np.sqrt(sum(map(len, groups)))
    out, _, (note,) = run(["scattering"], regression(7 * image[None]))  # the unit of brightness does not matter
    np.testing.assert_allclose(out.features[0], expected, atol=2e-3)
    assert note.public
    assert np.linalg.norm(out.features[0]) == pytest.approx(1, abs=1e-5)
    coloured, _, _ = run(["scattering"], regression(np.repeat(image[None, :, :, None], 3, axis=3)))
    np.testing.assert_allclose(coloured.features[0, : expected.size] * np.sqrt(460 / 324), expected, atol=5e-3)
    assert not coloured.features[0, expected.size :].any()  # grey: no colour


def test_colours_stand_beside_oriented_gradients_with_equal_weight(rng):
    images = rng.uniform(size=(3, 8, 8, 3)).astype(np.float32)
    out, _, _ = run(["hog-colour"], regression(images))
    gradients, _, _ = run(["hog"], regression(images))
    assert out.features.shape == (3, 32 + 12 + 16)
    np.testing.assert_allclose(out.features[:, :32], gradients.features / 2, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(out.features, axis=1), 1, atol=1e-5)
    red, green, blue = np.moveaxis(images, 3, 0)
    for first, difference in ((44, (red - blue) / 2), (52, (2 * green - red - blue) / 4)):
        expected = [slow_hog(layer[..., None].astype(np.float64), 8, 8) / 2 for layer in difference]
        np.testing.assert_allclose(out.features[:, first : first + 8], expected, atol=1e-5)
    recoloured, _, _ = run(["hog-colour"], regression(images[..., ::-1]))
    np.testing.assert_allclose(recoloured.features[:, :36], out.features[:, :36], atol=1e-5)  # brightness stays
    assert np.abs(recoloured.features[:, 36:44] - out.features[:, 36:44]).max() > 0.01


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_parts_together_are_the_whole_and_their_errors_are_raised(threads):
    records = np.arange(22, dtype=np.float32).reshape(11, 2)
    np.testing.assert_array_equal(in_parts(lambda part: 2 * part, records, 3, threads), 2 * records)

    def fails_late(part: np.ndarray) -> np.ndarray:
        if part[0, 0] > 6:
            raise ValueError("late")
        return part

    with pytest.raises(ValueError, match="late"):
        in_parts(fails_late, records, 3, threads)


@pytest.mark.parametrize(
    ("sides", "step", "told"),
    [
        ((8, 8), "scattering:3", "allow 1 to 2"),
        ((7, 8), "scattering", "odd sides"),
        ((8, 8), "scattering:1.5", "whole"),
    ],
)
def test_scales_fit_the_image(sides, step, told):
    with pytest.raises(ValueError, match=told):
        run([step], regression(np.ones((2, *sides))))


def test_filters_in_a_file_are_an_encoder(tmp_path, rng, monkeypatch):
    filters, bias = rng.normal(size=(2, 3, 3, 3)), rng.normal(size=2)
    np.savez(tmp_path / "own.npz", filters=filters, bias=bias)
    images = rng.normal(size=(2, 6, 6, 3))
    out, _, (note,) = run([f"encoder:{tmp_path}/own.npz"], regression(images))
    seen = np.zeros((2, 2, 4, 4))
    for n, k, r, s in np.ndindex(*seen.shape):
        window = np.moveaxis(images[n, r : r + 3, s : s + 3], 2, 0)
        seen[n, k, r, s] = max(0, (window * filters[k]).sum() + bias[k])
    expected = seen.reshape(2, -1)
    np.testing.assert_allclose(out.features, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-5)
    assert note.public and "own.npz" in note.text
    with pytest.raises(ValueError, match="do not fit images"):
        run([f"encoder:{tmp_path}/own.npz"], regression(images[..., 0]))
    np.savez(tmp_path / "own.npz", filters=filters[0])
    with pytest.raises(ValueError, match="need finite filters"):
        run([f"encoder:{tmp_path}/own.npz"], regression(images))
    monkeypatch.setattr(registry, "_allowed", set())  # a silo's process imports no code by name
    with pytest.raises(ValueError, match="not listed by this silo's operator"):
        run(["encoder:tests.test_data_preprocess:edges"], regression(images))


def test_all_zero_targets():
    with pytest.raises(ValueError, match="all targets are 0"):
        run(["target-max"], regression(np.ones((2, 1)), [0, 0]))


def test_steps_are_fitted_on_the_training_records_of_the_silos_only(rng):
    x, y = rng.normal(size=(100, 2)), rng.normal(size=100)
    plain = load_data((x, y), 4, test=0.3, records=10, seed=5)
    data = load_data((x, y), 4, test=0.3, records=10, seed=5, preprocess=["standardise"])
    used = np.concatenate([s.features for s in plain.silos])
    assert len(used) == 40
    assert plain.test is not None
    assert data.test is not None
    expected = (plain.test.features - used.mean(axis=0)) / used.std(axis=0)
    np.testing.assert_allclose(data.test.features, expected, atol=1e-5)


def test_step_text_round_trip():
    assert [str(s) for s in parse_steps(["divide: 255", "bias"])] == ["divide:255", "bias"]
    assert str(Step("pca", "3").error("x")) == "preprocess step 'pca:3': x"
