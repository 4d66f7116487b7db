"""Configs whose whole manifests the tests compare (tests/launch/test_golden.py): preset and overrides."""

from llmtrain import registry

TWO_NODES = [
    "output.run_id=ddp-demo",
    "launch.namespace=research",
    "launch.nodes=2",
    "launch.image=registry.example.com/ml/llmtrain:0.1.0",
    "launch.image_pull_secrets=registry-login",
    "launch.resources.cpu=500m",
    "launch.resources.memory=2Gi",
    "launch.resources.shm_size=256Mi",
    "launch.runs_volume.storage_class=nfs",
    "launch.hf_token_secret.name=hf-token",
    "launch.env_secrets=[s3-login]",
    "launch.pod_disruption_budget=true",
    "launch.queue=team-a",
]
GPU = [
    "launch.namespace=research",
    "launch.image=registry.example.com/ml/llmtrain:0.1.0-cuda",
    "launch.runs_volume.claim=shared-runs",
    "launch.data_volume.claim=corpora",
    "launch.tolerations=[{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]",
    "launch.node_selector={nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}",
    "launch.priority_class=training",
    "launch.env={NCCL_DEBUG: WARN}",
    "launch.ttl_sec=604800",
]
CASES = {
    "indexed_job": ("ddp_smoke", TWO_NODES),
    "stateful_set": ("ddp_smoke", [*TWO_NODES, "launch.kind=stateful_set"]),
    "pytorch_job": ("ddp_smoke", [*TWO_NODES, "launch.kind=pytorch_job", "launch.processes_per_node=2"]),
    "pytorch_job_master": ("ddp_smoke", [*TWO_NODES, "launch.kind=pytorch_job", "launch.pytorch_master=true"]),
    "train_job": ("ddp_smoke", [*TWO_NODES, "launch.kind=train_job", "launch.processes_per_node=2"]),
    "job_set": ("ddp_smoke", [*TWO_NODES, "launch.kind=job_set"]),
    "gpu_4x1": (
        "gpt2_124m",
        [
            *GPU,
            "output.run_id=gpt2-4x1",
            "launch.nodes=4",
            "launch.resources.gpus=1",
            "launch.resources.cpu=16",
            "launch.resources.memory=128Gi",
            "launch.resources.shm_size=16Gi",
            "trainer.grad_accum_steps=40",
        ],
    ),
    "gpu_64x8": (
        "gpt2_124m",
        [
            *GPU,
            "output.run_id=gpt2-64x8",
            "launch.nodes=64",
            "launch.processes_per_node=8",
            "launch.resources.gpus=8",
            "launch.resources.cpu=96",
            "launch.resources.memory=1Ti",
            "launch.resources.shm_size=128Gi",
            "launch.active_deadline_sec=259200",
            "trainer.grad_accum_steps=512",
        ],
    ),
}
CASES["monitored"] = (
    "ddp_smoke",
    [*TWO_NODES, "tracking.prometheus.port=9400", "launch.pod_monitor=true", "launch.labels={release: prometheus}"],
)
# Every field that shapes the pod, and a patch for what has none.
SHAPED = [
    *TWO_NODES,
    "launch.labels={team: vision, example.com/cost-center: '4711'}",
    "launch.annotations={cluster-autoscaler.kubernetes.io/safe-to-evict: 'false'}",
    "launch.service_account=trainer",
    "launch.runtime_class=nvidia",
    "launch.scheduler_name=volcano",
    "launch.host_network=true",
    "launch.run_as_user=2000",
    "launch.run_as_group=3000",
    "launch.fs_group=3000",
    "launch.capabilities=[IPC_LOCK]",
    "launch.resources.gpus=1",
    "launch.resources.ephemeral_storage=50Gi",
    "launch.resources.extra={vpc.amazonaws.com/efa: 4, hugepages-2Mi: 5120Mi}",
    "launch.topology_spread=[{maxSkew: 1, topologyKey: topology.kubernetes.io/zone, whenUnsatisfiable: DoNotSchedule}]",
    "launch.extra_volumes=[{name: scratch, hostPath: {path: /mnt/nvme}}, {name: login, secret: {secretName: s3}}]",
    "launch.extra_mounts=[{name: scratch, mountPath: /scratch}, {name: login, mountPath: /login, readOnly: true}]",
    """launch.pod_patch={
      metadata: {annotations: {k8s.v1.cni.cncf.io/networks: rail-1}},
      spec: {
        dnsConfig: {options: [{name: ndots, value: '2'}]},
        automountServiceAccountToken: null,
        volumes: [{name: cache, ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce]}}}}],
        containers: [
          {name: trainer, env: [{name: FI_PROVIDER, value: efa}], resources: {limits: {cpu: null}}},
          {name: exporter, image: registry.example.com/exporter:1}]}}""",
]
CASES |= {f"shaped_{kind}": ("ddp_smoke", [*SHAPED, f"launch.kind={kind}"]) for kind in registry.KINDS}
