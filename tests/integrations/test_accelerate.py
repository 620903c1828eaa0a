"""Accelerate gives the ranks of a mesh the same batches."""

from __future__ import annotations

import os
from unittest.mock import create_autospec

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, ParallelismConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset

from flexcp import FlexCPError
from flexcp.comm.rank_errors import RankError
from flexcp.integrations.accelerate import share_batches
from flexcp.testing import spawn


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(12))


def prepared(mesh, data, **options):
    """The batches that every rank of two groups of two gets."""
    rank = str(mesh.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    accelerator = Accelerator(cpu=True, **options)
    share_batches(accelerator, both["cp"])
    return [batch.tolist() for batch in accelerator.prepare(DataLoader(data, batch_size=2))]


@pytest.mark.parametrize("data", [torch.arange(12), Stream()], ids=["map", "stream"])
def test_groups_get_different_batches_and_ranks_of_a_group_the_same(data):
    first, same, second, same_too = spawn(lambda mesh: prepared(mesh, data), 4)
    assert first == same
    assert second == same_too
    assert sorted(x for batch in first + second for x in batch) == list(range(12))


def test_batches_that_one_process_deals_out_are_refused():
    config = DataLoaderConfiguration(dispatch_batches=True)
    with pytest.raises(RankError, match="expected dispatch_batches=False"):
        spawn(lambda mesh: prepared(mesh, Stream(), dataloader_config=config), 4)


@pytest.mark.parametrize("name", ["cp_size", "tp_size"])
def test_an_accelerator_that_shares_out_sequences_itself_is_refused(name):
    accelerator = create_autospec(Accelerator, instance=True)
    accelerator.parallelism_config = ParallelismConfig(**{name: 2})
    with pytest.raises(FlexCPError, match=rf"got {name}=2; leave {name} out, and pass the ranks"):
        share_batches(accelerator, 2)
