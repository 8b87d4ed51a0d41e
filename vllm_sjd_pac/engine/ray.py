"""Ray: vLLM's executor with a check of all nodes, bounded waits, and CPU workers.

Subclasses of vLLM 0.32's ``RayExecutorV2`` and of its worker process. `use_our_executor` puts the executor in place of
``--distributed-executor-backend ray`` when the method is on; an engine without the method keeps vLLM's own. Replicas of
``--data-parallel-backend ray`` are placed by `reserve_replicas`, before any of them starts.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from vllm_sjd_pac.engine import compat, nodes
from vllm_sjd_pac.engine.arguments import options_of

logger = init_logger("vllm.sjd_pac.ray")

_REPORT_SECONDS = 120
_PROBE_SECONDS = 5


class JacobiRayWorkerProc(RayWorkerProc):
    """vLLM's worker process in a Ray actor, on CPUs too, and with the network interface of its own node."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Node and devices of this worker; CPU workers have no devices to number."""
        if current_platform.is_cpu():
            return ray.get_runtime_context().get_node_id(), []
        return super().get_node_and_physical_gpu_ids()

    def initialize_worker(
        self,
        local_rank: int,
        env_vars: dict[str, str],
        distributed_init_method: str,
        driver_env_vars: dict[str, str] | None = None,
        assigned_physical_gpu_ids: list[int] | None = None,
    ) -> None:
        """Load the model; see vLLM's method."""
        driver_env_vars = dict(driver_env_vars or {})
        wanted = driver_env_vars.pop("GLOO_SOCKET_IFNAME", None)
        interface = gloo_interface(ray.util.get_node_ip_address(), wanted)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if current_platform.is_cpu():
            compat.use_host_in_shared_memory_names(ray.get_runtime_context().get_node_id())
        super().initialize_worker(
            local_rank, env_vars, distributed_init_method, driver_env_vars, assigned_physical_gpu_ids or None
        )


class JacobiRayExecutor(RayExecutorV2):
    """vLLM's Ray executor; checks the cluster before it starts workers.

    Raises:
        ValueError: no cluster answers, it has too few CPUs or GPUs, or a node has other software than the driver.
    """

    def _init_executor(self) -> None:
        config: Any = self.parallel_config
        compat.name_ray_resource_of_cpus()
        connect(config.ray_runtime_env)
        group = config.placement_group or ray.util.get_current_placement_group()
        if group is not None:
            check_nodes(self.vllm_config, [group])
        else:
            wait = options_of(self.vllm_config).ray_wait
            group = reserve(config.world_size, current_platform.ray_device_key, wait)
            try:
                check_nodes(self.vllm_config, [group])
            except BaseException:
                ray.util.remove_placement_group(group)
                raise
            config.placement_group = group
        with compat.ray_workers(JacobiRayWorkerProc), compat.ray_bundles(config.world_size, group):
            super()._init_executor()

    def _build_runtime_env(self) -> dict[str, Any]:
        environment = super()._build_runtime_env()
        if current_platform.is_cpu() and "OMP_NUM_THREADS" in os.environ:
            # Ray gives an actor without CPUs of its own one thread, before the driver's variables arrive.
            environment["env_vars"].setdefault("OMP_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
        return environment

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        if current_platform.is_cpu():
            return {"num_gpus": 0}  # the bundle reserves a CPU; vLLM's call asks for none beyond it
        return RayExecutorV2._get_actor_resource_kwargs()


def check_nodes(vllm_config: Any, groups: list[Any]) -> None:
    """Compare what every node of the placement groups has installed with this process.

    Raises:
        ValueError: a node does not answer, or has other software or no model folder.
    """
    options, model = options_of(vllm_config).to_mapping(), vllm_config.model_config.model
    report = nodes.reporter()
    names = {node["NodeID"]: f"{node['NodeManagerAddress']} (id {node['NodeID'][:8]})" for node in ray.nodes()}
    place_of = {
        node: PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        for group in groups
        for index, node in ray.util.placement_group_table(group)["bundles_to_node_id"].items()
    }
    task = ray.remote(report)
    pending = {
        task.options(num_cpus=0, max_retries=0, scheduling_strategy=place).remote(options, model): names[node]
        for node, place in place_of.items()
    }
    done, late = ray.wait(list(pending), num_returns=len(pending), timeout=_REPORT_SECONDS)
    if late:
        raise ValueError(
            f"sjd_pac: no report within {_REPORT_SECONDS} s from node {', '.join(pending[ref] for ref in late)}; "
            "see `ray status` and the logs there"
        )
    nodes.check(report(options, model), {pending[ref]: ray.get(ref) for ref in done})


def connect(runtime_env: Any) -> None:
    """Connect this process to the cluster of ``RAY_ADDRESS``, else of this machine, else start one here.

    Raises:
        ValueError: the address is known but nothing answers there; Ray itself would try for minutes.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address, source = compat.ray_cluster_address()
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit() and "://" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
        except OSError as error:
            raise ValueError(
                f"sjd_pac: no Ray cluster answers at {address} (from {source}): {error}; start it with `ray start`, or "
                "correct the address; a file left by a dead cluster goes away with `ray stop`"
            ) from None
    ray.init(runtime_env=runtime_env)


def reserve(count: int, resource: str, seconds: float) -> Any:
    """A placement group with `count` bundles of one `resource` each, packed on as few nodes as possible.

    Raises:
        ValueError: the cluster could not provide it within `seconds`.
    """
    group = ray.util.placement_group([{resource: 1.0}] * count, strategy="PACK")
    if ray.cluster_resources().get(resource, 0) < count:
        logger.warning("%s; waiting up to %g s for more nodes", _shortage(count, resource), seconds)
    if not group.wait(timeout_seconds=seconds):
        ray.util.remove_placement_group(group)
        raise ValueError(
            f"sjd_pac: {_shortage(count, resource)}, and {seconds:g} s later that is still so; add nodes, lower "
            "--tensor-parallel-size, free what other jobs hold (`ray status`), or raise --sjd-pac-ray-wait"
        )
    return group


def _shortage(count: int, resource: str) -> str:
    nodes_alive = [node for node in ray.nodes() if node["Alive"]]
    listed = ", ".join(f"{n['NodeManagerAddress']}: {n['Resources'].get(resource, 0):g}" for n in nodes_alive)
    total, free = ray.cluster_resources().get(resource, 0), ray.available_resources().get(resource, 0)
    return (
        f"--tensor-parallel-size {count} needs {count} {resource}s, but the Ray cluster has {total:g} ({free:g} free) "
        f"on {len(nodes_alive)} nodes ({listed})"
    )


def reserve_replicas(
    vllm_config: Any, create: Callable[[Any], tuple[list[Any], list[int]]]
) -> tuple[list[Any], list[int]]:
    """Placement groups for the engines of ``--data-parallel-backend ray``, and their ranks on their nodes.

    Args:
        create: vLLM's own placement; it counts no CPU for the engines themselves and waits for nothing.

    Raises:
        ValueError: no cluster answers, it could not hold all engines in time, or a node has other software.
    """
    config, seconds = vllm_config.parallel_config, options_of(vllm_config).ray_wait
    connect(config.ray_runtime_env)
    end = time.monotonic() + seconds
    needs = Counter({current_platform.ray_device_key: config.world_size}) + Counter(CPU=1)
    while _engines_that_fit(needs) < config.data_parallel_size and time.monotonic() < end:
        time.sleep(1)
    groups: list[Any] = []
    try:
        if _engines_that_fit(needs) >= config.data_parallel_size:
            groups, ranks = create(vllm_config)
        if not groups or not all(group.wait(max(_PROBE_SECONDS, end - time.monotonic())) for group in groups):
            raise ValueError(
                f"sjd_pac: --data-parallel-size {config.data_parallel_size} over Ray needs for each engine "
                f"{' and '.join(f'{count} {name}s' for name, count in needs.items())} on one node (a CPU more than its "
                f"ranks), and {config.data_parallel_size_local} of them on {config.data_parallel_master_ip}, but free "
                f"are {_free(needs)}, and {seconds:g} s later that is still so; add nodes, lower --data-parallel-size "
                "or --data-parallel-size-local, free what other jobs hold (`ray status`), or raise --sjd-pac-ray-wait"
            )
        check_nodes(vllm_config, groups)
    except BaseException:
        for group in groups:
            ray.util.remove_placement_group(group)
        raise
    return groups, ranks


def _engines_that_fit(needs: Counter[str]) -> int:
    """How many engines the free resources hold."""
    free = list(available_resources_per_node().values())
    if envs.VLLM_RAY_DP_PACK_STRATEGY == "span":  # engines may spread over nodes
        free = [sum((Counter(node) for node in free), Counter())]
    return sum(min(int(node.get(name, 0) // count) for name, count in needs.items()) for node in free)


def _free(needs: Counter[str]) -> str:
    """What each node has free of the resources that are needed."""
    free = available_resources_per_node()
    return "; ".join(
        f"{node['NodeManagerAddress']}: "
        + ", ".join(f"{free.get(node['NodeID'], {}).get(name, 0):g} {name}s" for name in needs)
        for node in ray.nodes()
        if node["Alive"]
    )


def gloo_interface(address: str, wanted: str | None) -> str | None:
    """Network interface for Gloo on a node that Ray knows by `address`.

    Without one, Gloo takes the interface of the host's name, which is often the loopback.

    Args:
        wanted: the driver's choice; it holds where an interface of that name exists.
    """
    interfaces = psutil.net_if_addrs()
    if wanted is not None and set(wanted.split(",")) <= set(interfaces):
        return wanted
    if address.startswith("127."):
        address = "127.0.0.1"  # all of 127/8 is the loopback, which lists one address
    for name, addresses in interfaces.items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return name
    return None


def use_our_executor(config: Any) -> None:
    """Let a ``VllmConfig`` that uses Ray use `JacobiRayExecutor` and `reserve_replicas`.

    Raises:
        ValueError: the environment asks for vLLM's older Ray executor.
    """
    if not compat.ray_executor_v2():
        raise ValueError("sjd_pac: VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 is not supported; leave it out")
    model, parallel = config.model_config, config.parallel_config
    for name in ("model", "tokenizer"):  # Ray starts workers in other folders
        if os.path.isdir(getattr(model, name) or ""):
            setattr(model, name, os.path.abspath(getattr(model, name)))
    if parallel.distributed_executor_backend == "ray":
        parallel.distributed_executor_backend = JacobiRayExecutor
    if parallel.data_parallel_backend == "ray":
        compat.name_ray_resource_of_cpus()  # engines are placed from this process
        compat.place_ray_replicas(reserve_replicas)
