"""Uploads and downloads on a device that is late: nothing is overwritten early, nothing waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_accelerator import FakeAccelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tercet.model_executor.device.device_buffers import Downloads, Uploads

CPU = torch.device("cpu")
DTYPES = (np.int32, np.int64, np.float32, np.float64)
arrays = st.lists(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(max_dims=2, min_side=0, max_side=5))
    ),
    min_size=1,
    max_size=6,
)


def same(tensor: torch.Tensor, array: np.ndarray) -> bool:
    return tensor.shape == array.shape and tensor.numpy().tobytes() == array.tobytes()


@settings(max_examples=60)
@given(st.lists(arrays, min_size=1, max_size=40), st.integers(0, 60))
def test_arrays_arrive_as_they_were_sent(batches, lag) -> None:
    accelerator = FakeAccelerator(lag)
    uploads = Uploads(CPU, accelerator)
    sent = []
    for batch in batches:
        tensors = uploads.send(*batch)
        assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors if tensor.numel())
        target = torch.zeros(batch[0].size, dtype=torch.from_numpy(batch[0]).dtype)
        uploads.send_to(target, batch[0].reshape(-1))
        sent.append((batch, tensors, target))
    for batch, tensors, target in sent:
        assert all(map(same, tensors, batch))
        assert same(target, batch[0].reshape(-1))
    accelerator.finish_until(accelerator.pending[-1])
    assert accelerator.num_waits == 0


@pytest.mark.parametrize("lag", [0, 1, 5, 15])
def test_pinned_memory_is_used_again(lag) -> None:
    accelerator = FakeAccelerator(lag)
    uploads = Uploads(CPU, accelerator)
    at_first = len(accelerator.uploads)
    for step in range(500):
        uploads.send(np.full(100, step))
    assert len(accelerator.uploads) == at_first
    # Large transfers have buffers of their own, as many as are in transfer at a time.
    for step in range(500):
        uploads.send(np.full(100_000 if step % 50 == 0 else 10, step))
    assert len(accelerator.uploads) <= at_first + 1
    for step in range(500):
        uploads.send(np.full(100_000, step))
    assert len(accelerator.uploads) <= at_first + lag + 1


def test_a_device_that_is_very_late_costs_memory_but_no_wait() -> None:
    accelerator = FakeAccelerator(lag=100)
    uploads = Uploads(CPU, accelerator)
    for step in range(1000):
        uploads.send(np.full(100, step))
    assert accelerator.num_waits == 0 and len(accelerator.uploads) < 200


def test_the_stand_in_notices_memory_that_is_overwritten_too_early() -> None:
    accelerator = FakeAccelerator(lag=5)
    uploads = Uploads(CPU, accelerator)
    uploads.send(np.arange(10))
    accelerator.uploads[0][0] += 1
    with pytest.raises(AssertionError, match="still read"):
        accelerator.finish_until(accelerator.pending[-1])


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=40), st.integers(0, 30))
def test_tokens_come_home(steps, lag) -> None:
    accelerator = FakeAccelerator(lag)
    downloads = Downloads(8, accelerator)
    unread = []
    for number, (count, read) in enumerate(steps):
        tokens = torch.arange(count) + 100 * number
        unread.append((downloads.fetch(tokens), tokens.tolist()))
        del tokens  # the result keeps what is being copied
        if read:
            result, expected = unread.pop(0)
            assert result.wait().tolist() == expected
            assert result.wait().dtype == np.int32
    for result, expected in unread:
        assert result.wait().tolist() == expected
        assert result.wait().tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 40_000), st.booleans()), max_size=20), st.integers(0, 30))
def test_arrays_of_any_size_come_home(steps, lag) -> None:
    downloads = Downloads(8, FakeAccelerator(lag))
    unread = []
    for number, (count, read) in enumerate(steps):
        array = torch.arange(count, dtype=torch.float32) + number
        unread.append((downloads.fetch_array(array), array.tolist()))
        del array  # the result keeps what is being copied
        if read:
            result, expected = unread.pop(0)
            assert result.wait().tolist() == expected
    for result, expected in unread:
        assert result.wait().tolist() == expected
    for result, expected in unread:  # another copy may use the buffers by now
        assert result.wait().tolist() == expected


def test_an_array_keeps_its_shape() -> None:
    downloads = Downloads(8, FakeAccelerator(lag=3))
    array = torch.arange(12, dtype=torch.int16).view(3, 4)
    assert downloads.fetch_array(array).wait().tolist() == array.tolist()


def test_buffers_for_tokens_are_used_again() -> None:
    accelerator = FakeAccelerator(lag=3)
    downloads = Downloads(8, accelerator)
    made = len(accelerator.uploads)
    calls = []
    accelerator.pinned = lambda num_bytes: calls.append(num_bytes)
    previous = downloads.fetch(torch.arange(3))
    for step in range(100):
        following = downloads.fetch(torch.full((8,), step))
        previous.wait()
        previous = following
    assert made == 4 and calls == []


def test_a_cpu_copies_nothing() -> None:
    array = np.arange(5)
    (tensor,) = Uploads(CPU, None).send(array)
    assert tensor.data_ptr() == array.ctypes.data
    target = torch.zeros(5, dtype=torch.int64)
    Uploads(CPU, None).send_to(target, array)
    assert target.tolist() == array.tolist()
    assert Downloads(8, None).fetch(tensor).wait().tolist() == array.tolist()


def test_two_sampled_steps_of_256_rows_allocate_no_buffer() -> None:
    accelerator = FakeAccelerator(lag=10_000)  # the device is late: no buffer is free again
    uploads = Uploads(CPU, accelerator)
    before = len(accelerator.uploads)
    for _ in range(64):
        uploads.send(np.zeros(256, np.int32))
    assert len(accelerator.uploads) == before
