"""A small cluster for the tests of one file."""

from collections.abc import Iterator

import pytest

from coatcheck.bench.failure_cases.chaos_cluster import ChaosCluster


@pytest.fixture(scope="module")  # what follows should not share the cores with it
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    """Two groups of two ranks on a Ray that runs already, so that `serve` can be killed too."""
    from tests.router.tiny_tokenizer import write_model
    from tests.workers.checkpoints import tiny_checkpoint

    directory = tmp_path_factory.mktemp("chaos")
    model = write_model(tiny_checkpoint("llama", directory, vocab_size=600, max_position_embeddings=2048))
    with ChaosCluster(model, directory, kv_memory="2400KiB", host_kv_memory="9MiB") as cluster:
        yield cluster
