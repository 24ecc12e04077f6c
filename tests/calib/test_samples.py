"""Every form a data hook may return gives the same batches; what does not fit is named."""

from dataclasses import dataclass

import numpy as np
import pytest

from layerline.calib.named_arrays import as_array
from layerline.calib.samples import Samples
from layerline.pipeline.errors import PipeError, TaskError


@dataclass(frozen=True)
class In:
    name: str
    dtype: str = "float32"
    shape: tuple = ("batch", 3)


X = np.arange(30, dtype=np.float32).reshape(10, 3)
Y = np.arange(10)
TWO = (In("a"), In("b", "int64", ("batch",)))


class Tensor:
    """A torch tensor, as far as its duck type goes."""

    def __init__(self, array):
        self.array = array
        self.dtype, self.shape = array.dtype, array.shape

    def detach(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        return self.array


class Dataset:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Loader:
    """A re-iterable of batches without random access."""

    def __iter__(self):
        return iter([(X[:4], Y[:4]), (X[4:], Y[4:])])


def samples(data, inputs=(In("x"),), **options):
    return Samples(data, inputs, hook="calib_data", **options)


def joined(data, inputs=(In("x"),), **options):
    batches = list(samples(data, inputs, **options))
    feed = {k: np.concatenate([b.feed[k] for b in batches]) for k in batches[0].feed}
    targets = [b.target for b in batches if b.target is not None]
    return feed, np.concatenate(targets) if targets else None, [b.rows for b in batches]


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (Tensor(X), Tensor(Y)),
        {"x": X, "label": Y},
        ({"x": X}, Y),
        [(X[:4], Y[:4]), (X[4:], Y[4:])],
        [[X[:4], Y[:4]], [Tensor(X[4:]), Tensor(Y[4:])]],
        [{"x": X[:4], "labels": Y[:4]}, {"x": X[4:], "labels": Y[4:]}],
        Loader(),
        Dataset(list(zip(X, Y, strict=True))),
        Dataset([{"x": x, "label": y} for x, y in zip(X, Y, strict=True)]),
        iter([(X, Y)]),
    ],
    ids=lambda d: type(d).__name__,
)
def test_every_form_of_data_gives_the_same_feeds_and_targets(data):
    feed, target, _ = joined(data, batch_size=4)
    assert (feed["x"] == X).all() and feed["x"].dtype == np.float32
    assert (target == Y).all()


@pytest.mark.parametrize(
    "data",
    [X, (X,), {"x": X}, [X[:4], X[4:]], Dataset(list(X)), [(X, None)], [({"x": X}, None)], [{"x": X, "label": None}]],
    ids=lambda d: type(d).__name__,
)
def test_data_without_targets(data):
    feed, target, _ = joined(data)
    assert (feed["x"] == X).all() and target is None


@pytest.mark.parametrize("data", [(X, Y, Y + 1), ((X, Y), Y + 1), {"b": Y, "a": X, "label": Y + 1}])
def test_several_inputs_by_position_nested_or_by_name(data):
    feed, target, _ = joined(data, TWO)
    assert (feed["a"] == X).all() and (feed["b"] == Y).all() and (target == Y + 1).all()


def test_two_arrays_are_two_inputs_of_a_model_that_takes_two():
    feed, target, _ = joined((X, Y), TWO)
    assert (feed["b"] == Y).all() and target is None


def test_a_label_that_the_model_takes_is_an_input():
    feed, target, _ = joined({"x": X, "label": Y}, (In("x"), In("label", "int64", ("batch",))))
    assert (feed["label"] == Y).all() and target is None


def test_rank_0_inputs_are_not_split():
    feed = [b.feed for b in samples({"x": X, "k": np.float32(2)}, (In("x"), In("k", shape=())), batch_size=4)]
    assert [f["k"] for f in feed] == [2, 2, 2] and feed[2]["x"].shape == (2, 3)


def test_limits_spread_over_columns_and_datasets_and_cut_iterables():
    assert joined((X, Y), limit=3)[1].tolist() == [0, 3, 6]
    assert joined(Dataset(list(zip(X, Y, strict=True))), limit=3)[1].tolist() == [0, 3, 6]
    assert joined(Loader(), limit=3)[1].tolist() == [0, 1, 2, 3]
    assert joined((X, Y), limit=99)[1].size == 10


@pytest.mark.parametrize(
    ("data", "limit", "count"),
    [
        ((X, Y), None, 10),
        ((X, Y), 512, 10),
        ({"x": X}, 4, 4),
        (X, None, 10),
        (Dataset(list(zip(X, Y, strict=True))), 512, 10),
        ([{"x": X[:4]}, {"x": X[4:]}], 512, 10),
        ([(X[:4], Y[:4])], None, 4),
        ([], 512, 0),
        (Loader(), 512, None),
        (iter([X]), 512, None),
    ],
)
def test_how_many_there_will_be_is_known_without_reading(data, limit, count):
    assert samples(data, limit=limit).count() == count


def test_a_batch_counts_by_its_first_input():
    two = (In("x"), In("state", shape=(2, "n")))
    assert samples([{"x": X, "state": X[:2]}], two).count() == 10


def test_a_fixed_batch_axis_is_filled_up_and_the_real_rows_are_counted():
    feed, target, rows = joined((X, Y), (In("x", shape=(4, 3)),))
    assert rows == [4, 4, 2] and feed["x"].shape == (12, 3)
    assert target.tolist() == list(range(10)) and (feed["x"][10:] == X[8]).all()


def test_types_are_widened_and_narrowed_but_never_from_float_to_integer():
    feed, _, _ = joined(X.astype(np.float64))
    assert feed["x"].dtype == np.float32
    assert joined(X.astype(np.uint8))[0]["x"].dtype == np.float32
    with pytest.raises(TaskError, match=r"calib_data: b.*gives float32; the model takes int64"):
        list(samples((X, Y.astype(np.float32)), TWO))


INTS, FLOATS = np.arange(10).reshape(10, 1), np.arange(10.0).reshape(10, 1)
INTS[7], FLOATS[7] = 2**31 + 5, 1e39


@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize(
    ("form", "place"),
    [
        (lambda x: x, "calib_data: x[7, 0]"),
        (lambda x: {"x": x}, "calib_data: x[7, 0]"),
        (lambda x: Dataset([(row,) for row in x]), "calib_data: x[7, 0]"),
        (lambda x: [x[:4], x[4:]], "calib_data, batch 1: x[3, 0]"),
    ],
)
def test_a_number_that_the_models_type_does_not_hold_is_refused_by_place(form, place, dtype):
    """2^31 + 5 would wrap to -2147483643, and 1e39 would become inf."""
    data, takes = INTS if dtype == "int32" else FLOATS, In("x", dtype, ("batch", 1))
    with pytest.raises(PipeError) as error:
        list(samples(form(data), (takes,), batch_size=3))
    assert str(error.value).startswith(f"{place} is {'2147483653' if dtype == 'int32' else '1e+39'}, expected {dtype}")
    assert len(list(samples(form(data[:7]), (takes,), batch_size=3))) in (2, 3)


@pytest.mark.parametrize(
    "data", [[], (X[:0], Y[:0]), Dataset([]), iter([]), [(X[:0], Y[:0])]], ids=lambda d: str(type(d))
)
def test_no_samples_are_an_error_that_counts_them(data):
    with pytest.raises(TaskError, match=r"0 calibration samples|calib_data\(\) gave no samples"):
        list(samples(data))


def test_a_used_up_generator_cannot_be_replayed():
    once = samples(b for b in [(X, Y)])
    assert len(list(once)) == 1
    with pytest.raises(TaskError, match="cannot be replayed: it is used up"):
        list(once)


def test_nor_can_a_reader_whose_second_pass_is_empty():
    class Exhausted:
        def __init__(self):
            self.left = iter([(X, Y)])

        def __iter__(self):
            yield from self.left

    reader = samples(Exhausted())
    list(reader)
    with pytest.raises(TaskError, match="cannot be replayed: the second pass gave nothing"):
        list(reader)


def test_replayable_data_can_be_read_twice():
    reader = samples(Loader())
    assert len(list(reader)) == len(list(reader)) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"y": X}, "unknown input 'y'"),
        ([{"x": X, "z": X}], "unknown input 'z'"),
        ({"label": Y}, "input 'x' is missing"),
        ((X, Y, Y), r"3 arrays a batch, .*; the model takes 1: x"),
        ((X, Y[:4]), "differ in length: lengths"),
        (X.reshape(10, 3, 1), r"shape \(10, 3, 1\); the model takes \(batch, 3\)"),
        (X[:, :2], r"shape \(10, 2\); the model takes \(batch, 3\)"),
        (Dataset([(X[0], 1), (X[1, :2], 2)]), r"samples 0 and 1 of calib_data\(\) differ in shape"),
        (42, r"calib_data\(\) gave int"),
        ([()], r"0 arrays a batch, \(\); the model takes 1: x"),
        (Dataset([()]), r"0 arrays a batch, \(\); the model takes 1: x"),
    ],
)
def test_what_does_not_fit_is_named(data, message):
    with pytest.raises(TaskError, match=message):
        list(samples(data))


@pytest.mark.parametrize("data", [[(X[0], 1), (X[1], 2)], [X, Y]], ids=["samples", "columns"])
def test_a_list_that_is_no_batches_is_not_counted_as_some(data):
    with pytest.raises(TaskError, match="a list counts as batches"):
        samples(data).count()


@pytest.mark.parametrize("broken", ["dataset", "loader"])
def test_an_error_in_the_users_reader_is_told_as_theirs(broken):
    class Broken(Dataset):
        def __getitem__(self, index):
            raise KeyError("image 7")

    def loader():
        yield (X, Y)
        raise OSError("disk gone")

    data = Broken([0]) if broken == "dataset" else loader()
    with pytest.raises(TaskError, match=r"reading what calib_data\(\) returned raised (KeyError|OSError)"):
        list(samples(data))


def test_bfloat16_tensors_arrive_as_their_float32_values():
    class BFloat16(Tensor):
        def __init__(self, array):
            super().__init__(array)
            self.dtype = "torch.bfloat16"

        def float(self):
            return Tensor(self.array)

        def numpy(self):
            raise TypeError("numpy has no bfloat16")

    assert as_array(BFloat16(np.float32([1.5]))).tolist() == [1.5]


@pytest.mark.parametrize("kind", ["sparse", "nested", "meta"])
def test_a_tensor_that_is_no_array_is_refused(kind):
    torch = pytest.importorskip("torch")
    tensor = {
        "sparse": torch.zeros(4, 3).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]),
        "meta": torch.zeros(4, 3, device="meta"),
    }[kind]
    with pytest.raises(TaskError, match="a tensor in the data cannot become an array"):
        list(samples(iter([(tensor,)])))
