"""What records on CUDA, with an imitation of `torch.cuda`: pools are counted as torch counts them."""

import gc
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch

from booster.capture.graph import CudaRecorder


class Cuda:
    """uses: of each pool, by how many graphs. A tensor is taken to lie in each of them for ever, so that none is let go."""

    def __init__(self):
        self.uses, self.num_handles = {}, 0
        cuda = self

        class CUDAGraph:
            def register_generator_state(self, generator):
                pass

            def begin(self, pool):
                if cuda.uses.get(pool) == 0:
                    raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
                cuda.uses[pool] = cuda.uses.get(pool, 0) + 1
                weakref.finalize(self, cuda.leave, pool)

            def replay(self):
                pass

        self.CUDAGraph = CUDAGraph

    def leave(self, pool):
        self.uses[pool] -= 1

    def graph_pool_handle(self):
        self.num_handles += 1
        return self.num_handles

    def Stream(self, device):
        return self

    def wait_stream(self, stream):
        pass

    def current_stream(self, device):
        return self

    def stream(self, stream):
        return nullcontext()

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        graph.begin(pool)
        yield


def recorded(recorder):
    return recorder.record(lambda: None, ())


def test_graphs_share_one_pool_while_any_is_left_and_begin_another_after():
    cuda = Cuda()
    recorder = CudaRecorder(torch.device("cpu"), cuda)
    first, second = recorded(recorder), recorded(recorder)
    assert list(cuda.uses.values()) == [2]
    del first
    third = recorded(recorder)
    assert list(cuda.uses.values()) == [2]
    del second, third
    gc.collect()
    kept = recorded(recorder)
    assert list(cuda.uses.values()) == [0, 1]
    del kept


def test_a_recording_that_raises_leaves_a_recorder_that_goes_on():
    cuda = Cuda()
    recorder = CudaRecorder(torch.device("cpu"), cuda)

    def body():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as raised:
        recorder.record(body, ())
    kept = recorded(recorder)
    del raised
    gc.collect()
    assert cuda.uses[cuda.num_handles] == 1
    other = recorded(recorder)
    assert cuda.uses[cuda.num_handles] == 2
    del kept, other
