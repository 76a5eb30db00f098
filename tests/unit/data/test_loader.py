"""Fact: in any layout, sequence n of a global batch is sample consumed + n, read by the ranks that the layout names."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.data.corpus.corpus import TokenFileSamples
from megatron3d.data.corpus.plan import Split
from megatron3d.data.loader import BatchLoader, PrefetchingLoader
from megatron3d.data.ramp_plan import Batches, make_ramp
from megatron3d.data.token_files.indexed import IndexedDataset
from megatron3d.data.token_files.writer import IndexedWriter
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer
from megatron3d.errors import UserError
from megatron3d.parallel.layout import span
from megatron3d.parallel.mesh import Mesh

SEQ_LENGTH = 3


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> TokenFileSamples:
    prefix = tmp_path_factory.mktemp("corpus") / "corpus"
    tokens = np.arange(200, dtype="<u2")
    with IndexedWriter(prefix, tokens.dtype) as writer:
        writer.add(tokens, np.array([len(tokens)], np.int32))
        writer.finish(ByteTokenizer(None))
    return TokenFileSamples(IndexedDataset(prefix), Split(0, 200), SEQ_LENGTH, 257, seed=7)


@settings(deadline=None)
@given(
    data_ranks=st.integers(1, 4),
    x=st.integers(1, 3),
    y=st.integers(1, 3),
    rows_per_rank=st.integers(1, 2),
    num_microbatches=st.integers(1, 3),
    consumed=st.integers(0, 10**9),
    batch_axes=st.sampled_from([(), ("x",), ("y", "x")]),
)
def test_every_sequence_is_read_at_its_index(
    samples: TokenFileSamples,
    data_ranks: int,
    x: int,
    y: int,
    rows_per_rank: int,
    num_microbatches: int,
    consumed: int,
    batch_axes: tuple[str, ...],
) -> None:
    mesh = Mesh((("pipeline", 2), ("data", data_ranks), ("x", x), ("y", y)))
    micro = rows_per_rank * mesh.size(batch_axes)
    batch = micro * data_ranks * num_microbatches
    expected = samples.read(consumed + np.arange(batch))
    readers = np.zeros(batch, int)
    for rank in range(mesh.world_size):
        here = mesh.at(rank)
        low, high = span(micro, batch_axes, here)
        for microbatch in BatchLoader(samples, here, batch_axes, micro, batch, torch.device("cpu")).step(consumed):
            place = slice(microbatch.first_sample + low, microbatch.first_sample + high)
            assert microbatch.tokens.dtype == torch.int64
            assert np.array_equal(microbatch.tokens.numpy(), expected[place])
            readers[place] += 1
    assert (readers == mesh.world_size // data_ranks // mesh.size(batch_axes)).all()


def test_first_samples_interleave_the_data_ranks(samples: TokenFileSamples) -> None:
    mesh = Mesh((("pipeline", 1), ("data", 2)), rank=1)
    steps = BatchLoader(samples, mesh, (), 2, 8, torch.device("cpu")).step(0)
    assert [microbatch.first_sample for microbatch in steps] == [2, 6]
    assert [tuple(microbatch.tokens.shape) for microbatch in steps] == [(2, SEQ_LENGTH + 1)] * 2


def test_a_batch_without_whole_microbatches_is_an_assertion(samples: TokenFileSamples) -> None:
    for batch in (8, 3):  # of microbatches of 3 for 2 ranks
        with pytest.raises(AssertionError, match="data ranks"):
            BatchLoader(samples, Mesh((("data", 2),)), (), 3, batch, torch.device("cpu"))


def test_ranks_that_do_not_divide_the_batch_get_empty_microbatches(samples: TokenFileSamples) -> None:
    """All ranks have as many microbatches, the real ones are the batch, and the others have no labels."""
    loaders = [BatchLoader(samples, Mesh((("data", 3),), rank), (), 2, 10, torch.device("cpu")) for rank in range(3)]
    steps = [loader.step(20) for loader in loaders]
    assert [len(step) for step in steps] == [2, 2, 2]
    empty = [[bool((each.tokens < 0).all()) for each in step] for step in steps]
    assert empty == [[False, False], [False, False], [False, True]]
    real = {each.first_sample: each.tokens for step in steps for each in step if (each.tokens >= 0).all()}
    assert sorted(real) == [0, 2, 4, 6, 8]
    assert np.array_equal(torch.cat([real[place] for place in sorted(real)]).numpy(), samples.read(20 + np.arange(10)))


def test_prefetching_reads_the_same_batches(samples: TokenFileSamples) -> None:
    mesh = Mesh((("pipeline", 1), ("data", 2)), rank=1)
    plain = BatchLoader(samples, mesh, (), 2, 8, torch.device("cpu"))
    ahead = PrefetchingLoader(plain, Batches(make_ramp(None, 8), make_ramp(None, SEQ_LENGTH)))
    for consumed in (0, 8, 16, 40, 48, 8, 16):
        for one, other in zip(plain.step(consumed), ahead.step(consumed), strict=True):
            assert torch.equal(one.tokens, other.tokens) and one.first_sample == other.first_sample


def test_errors_of_prefetching_are_raised_with_their_batch() -> None:
    class Short:
        def read(self, samples: np.ndarray) -> np.ndarray:
            if samples[-1] >= 8:
                raise UserError("no more")
            return np.zeros((len(samples), SEQ_LENGTH + 1), np.int64)

    loader = BatchLoader(Short(), Mesh((("data", 1),)), (), 1, 4, torch.device("cpu"))
    ahead = PrefetchingLoader(loader, Batches(make_ramp(None, 4), make_ramp(None, SEQ_LENGTH)))
    ahead.step(0)
    ahead.step(4)
    with pytest.raises(UserError, match="no more"):
        ahead.step(8)
