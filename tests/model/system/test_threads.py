"""Who computes in parallel."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from lora_serve.model.system.process import openmp, use_one_core


def test_a_thread_that_stands_aside_computes_on_one_core_and_others_as_before() -> None:
    def number_of_threads(cores: int) -> int:
        openmp().omp_set_num_threads(cores)
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as aside, ThreadPoolExecutor(1) as other:
        torch_own = other.submit(torch.get_num_threads).result()
        assert other.submit(number_of_threads, 3).result() == 3
        aside.submit(use_one_core).result()
        assert aside.submit(torch.get_num_threads).result() == 1
        assert other.submit(torch.get_num_threads).result() == 3
        assert other.submit(number_of_threads, torch_own).result() == torch_own
