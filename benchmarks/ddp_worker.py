"""One rank that trains data-parallel, in turn with the same steps without communication.

Obeys as the ranks of ``worker.py`` do.
"""

from __future__ import annotations

import abc
import json
import os
import socket
import time
from typing import Any, NamedTuple

import measure
import torch
from ddp_models import make_workload
from worker import Adapter, FerroDist, bind, obey

from ferro_dist.testing import share_gpu

IS_ON_GPU = os.environ["BENCHMARK_TRANSPORT"] == "gpu"
DEVICE = "cuda" if IS_ON_GPU else "cpu"


def synchronize() -> None:
    """Wait until the GPU has done what was asked of it."""
    if IS_ON_GPU:
        torch.cuda.synchronize()


def choose_gpu(rank: int, world_size: int) -> None:
    """Take a GPU of one's own, or share one where there are fewer than ranks."""
    if not IS_ON_GPU:
        return
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise RuntimeError("torch finds no GPU here")
    torch.cuda.set_device(rank % num_gpus)
    if num_gpus < world_size:
        share_gpu(rank)


def main() -> None:
    torch.set_num_threads(1)
    settings = json.loads(os.environ["BENCHMARK_SETTINGS"])
    adapter = ADAPTERS[os.environ["BENCHMARK_ADAPTER"]](settings)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["BENCHMARK_SOCKET"])
        obey(adapter, connection)


class Trainer(NamedTuple):
    """A model, or its wrapper, and its optimizer."""

    model: Any
    batch: tuple[Any, ...]
    loss: Any
    optimizer: Any

    def forward(self) -> Any:
        return self.loss(self.model, *self.batch)

    def step(self) -> None:
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def slope(self) -> tuple[float, float]:
        """Return the loss's slope in the direction of the parameters, and the size of its terms."""
        self.forward().backward()
        terms = torch.cat(
            [(p.detach() * p.grad).double().flatten() for p in self.model.parameters()]
        )
        self.optimizer.zero_grad()
        return float(terms.sum()), float(terms.abs().sum())


class DataParallelAdapter(Adapter):
    """A system with data parallelism."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        super().__init__()

    def obey(self, order: dict[str, Any]) -> Any:
        if order["do"] == "prepare":
            return self._prepare(order["model"])
        if order["do"] == "trace":
            return self._trace()
        with measure.GarbageCollectorOff():
            return self._sample(order["times"])

    def _prepare(self, name: str) -> dict[str, Any]:
        self._alone = self._trainer(name, is_parallel=False)
        self._parallel = self._trainer(name, is_parallel=True)
        (slope_alone, _), (slope_parallel, terms) = self._alone.slope(), self._parallel.slope()
        for _ in range(3):  # buckets are laid out anew after the first backward
            self._alone.step()
            self._parallel.step()
        return {
            "num_parameters": len(list(self._alone.model.parameters())),
            "slope_alone": slope_alone,
            "slope_parallel": slope_parallel,
            "terms": terms,
        }

    def _trainer(self, name: str, is_parallel: bool) -> Trainer:
        workload = make_workload(name, self.rank).to(DEVICE)
        model = self.wrap(workload.model) if is_parallel else workload.model
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        return Trainer(model, workload.batch, workload.loss, optimizer)

    def _sample(self, times: int) -> list[list[float]]:
        """Seconds of steps without communication and of steps with it, in turns."""
        alone: list[float] = []
        parallel: list[float] = []
        for _ in range(times):
            for trainer, durations in ((self._alone, alone), (self._parallel, parallel)):
                synchronize()
                self.meet()
                began_s = time.perf_counter()
                trainer.step()
                synchronize()
                durations.append(time.perf_counter() - began_s)
        return [alone, parallel]

    def _trace(self) -> dict[str, Any]:
        """One step: when its parts began and ended."""
        self.meet()
        trainer, times = self._parallel, {"begin_s": time.perf_counter()}
        loss = trainer.forward()
        times["forward_end_s"] = time.perf_counter()
        loss.backward()
        times["backward_end_s"] = time.perf_counter()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        times["end_s"] = time.perf_counter()
        return {**times, **self.timeline()}

    @abc.abstractmethod
    def wrap(self, model: Any) -> Any:
        """Make a model data-parallel."""

    @abc.abstractmethod
    def meet(self) -> None:
        """Wait for all ranks."""

    def timeline(self) -> dict[str, Any]:
        """Return when the buckets of the last step travelled."""
        raise NotImplementedError("this system does not say when its buckets travelled")


class FerroDdp(DataParallelAdapter):
    def connect(self) -> tuple[int, int]:
        choose_gpu(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        # As the benchmark of collectives joins, over any transport.
        self._ferro = FerroDist()
        return self._ferro.rank, self._ferro.world_size

    def about(self) -> str:
        return self._ferro.about()

    def wrap(self, model: Any) -> Any:
        return self._ferro.fd.DDP(model, self._ferro.backend, **self._settings)

    def meet(self) -> None:
        self._ferro.fd.barrier(self._ferro.backend)

    def timeline(self) -> dict[str, Any]:
        statistics = self._parallel.model.statistics()
        return {
            # Backward's own work, without the wait for what was not hidden.
            "compute_end_s": statistics.backward_end_s,
            "buckets": [
                {
                    "nbytes": bucket.nbytes,
                    "ready_s": bucket.ready_s,
                    "start_s": bucket.start_s,
                    "end_s": bucket.end_s,
                    "exposed_s": bucket.exposed_s,
                }
                for bucket in statistics.buckets
            ],
        }

    def close(self) -> None:
        self._ferro.close()


class TorchDdp(DataParallelAdapter):
    def connect(self) -> tuple[int, int]:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        bind(rank)
        choose_gpu(rank, world_size)
        import torch.distributed as dist

        self._dist = dist
        store = f"file://{os.environ['BENCHMARK_DIRECTORY']}/{os.environ['BENCHMARK_ID']}.store"
        library = "nccl" if IS_ON_GPU else "gloo"
        dist.init_process_group(library, init_method=store, rank=rank, world_size=world_size)
        return rank, world_size

    def about(self) -> str:
        return f"torch {torch.__version__} on {'NCCL' if IS_ON_GPU else 'Gloo'}"

    def wrap(self, model: Any) -> Any:
        return torch.nn.parallel.DistributedDataParallel(model, **self._settings)

    def meet(self) -> None:
        self._dist.barrier()

    def close(self) -> None:
        self._dist.destroy_process_group()


ADAPTERS = {"FerroDdp": FerroDdp, "TorchDdp": TorchDdp}


if __name__ == "__main__":
    main()
