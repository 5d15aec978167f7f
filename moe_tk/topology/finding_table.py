"""Every finding id of the "what to do" list: what it says, what it means, what mends it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FindingKind:
    """says and fix are templates over the finding's inputs. level: "info", "warn" or "fail" (may be raised by rule)."""

    id: str
    level: str
    says: str
    meaning: str
    fix: str


_KINDS = (
    FindingKind("not-verified", "warn", "peer access of {count} pairs was never verified on this boot",
                "The driver's word is only a hint, so these pairs count as having no peer access until a probe ran.",
                "moe_tk doctor --probe"),
    FindingKind("probe-mismatch", "warn", "{pair} ({what}): wrong data at byte {offset}: wanted {wanted}, read "
                                          "{seen}; {bad} "
                "words differ. Likely cause: {cause}",
                "A transfer between the two arrived wrong or not at all, although the driver claims peer access.",
                "{command}"),
    FindingKind("probe-timeout", "warn", "{pair} ({what}): nothing arrived within {limit} s. Likely cause: {cause}",
                "A probe hung and was killed; the pair is treated as having no peer access.", "{command}"),
    FindingKind("probe-error", "warn", "{pair} ({what}): the probe failed: {detail}",
                "The process of a probe ended with an error, so nothing was learnt about the pair.",
                "free the GPUs, then: moe_tk doctor --probe --no-cache"),
    FindingKind("atomics-lost", "info", "{pair}: {lost} of {sent} remote increments were lost",
                "Remote atomics are not reliable on this path. The pcie and staged protocols never use them.",
                "nothing: this is why the {protocol} protocol signals with single-writer flags"),
    FindingKind("slow-link", "warn", "{pair}: {gbs} GB/s measured, {wanted} GB/s wanted from {basis}",
                "A link moves less than 60 % of what its kind and width allow: another program uses it, a riser or "
                "slot "
                "trained badly, or traffic takes a detour over the host bridge.",
                "nvidia-smi -q | grep -A4 'Link Width'; stop other programs, then: moe_tk doctor --probe --no-cache"),
    FindingKind("host-path-faster", "info", "{pair}: host memory moves {staged} GB/s, direct access {peer} GB/s",
                "Direct access works but loses against going through host memory.",
                "choose nearer GPUs: moe_tk doctor --group {world}; or force it: MOE_TK_PROTOCOL=pcie"),
    FindingKind("probes-not-run", "warn", "probes were not run: {why}",
                "Probes were asked for and could not be started.", "{fix}"),
    FindingKind("probe-left-out", "info", "not probed: {what}",
                "A part of the probes does not apply here or had no time left.",
                "nothing, unless you need that number"),
    FindingKind("nvml-binding-missing", "warn", "the NVML binding cannot be imported ({error}): topology unknown",
                "The Python package nvidia-ml-py is absent or broken. CUDA may still work.",
                "python -m pip install nvidia-ml-py"),
    FindingKind("nvml-library-missing", "warn", "libnvidia-ml.so.1 cannot be loaded: topology unknown (CUDA: {cuda})",
                "The NVML library is part of the driver; containers without the utility capability lack it.",
                "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility, or install the driver's "
                "libraries"),
    FindingKind("nvml-driver-not-loaded", "warn", "NVML says that the driver is not loaded (tried {tried})",
                "The library is there but finds no kernel driver; under WSL a generic library shadows the usable one.",
                "WSL: put /usr/lib/wsl/lib first in LD_LIBRARY_PATH; else: sudo modprobe nvidia, and see dmesg"),
    FindingKind("nvml-version-mismatch", "warn",
                "kernel module {module} and user libraries differ in version ({error})",
                "The driver was upgraded, but the old kernel module is still loaded; usually CUDA fails too.",
                "reboot, or unload and load the module: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; "
                "sudo modprobe nvidia"),
    FindingKind("nvml-failed", "warn", "NVML does not start: {error}", "NVML answered with an error of another kind.",
                "nvidia-smi shows the same error; look at dmesg"),
    FindingKind("visible-empty", "info", "GPUs hidden by CUDA_VISIBLE_DEVICES={value!r}",
                "The variable is set but names no GPU.", "unset CUDA_VISIBLE_DEVICES"),
    FindingKind("visible-bad-entry", "fail",
                "CUDA_VISIBLE_DEVICES={value!r}: entry {entry!r}: {why}. CUDA ignores it and all entries after it; "
                "used: {used}",
                "The variable names a GPU that this machine or container does not have.",
                "correct CUDA_VISIBLE_DEVICES (nvidia-smi -L lists the GPUs)"),
    FindingKind("cuda-library-missing", "warn", "there is NVIDIA hardware, but libcuda.so.1 cannot be loaded",
                "The driver is not installed, or the container was started without GPUs. The CPU backend works.",
                "install the driver, or start the container with GPUs (docker run --gpus all)"),
    FindingKind("cuda-failed", "fail", "CUDA does not start: {error}",
                "The driver answers with an error, so no GPU can be used until it is mended.",
                "nvidia-smi and dmesg say more; after a driver upgrade: reboot"),
    FindingKind("cuda-no-device", "warn", "NVML shows {count} GPUs, CUDA shows none ({error})",
                "CUDA cannot open the GPUs: device files missing in a container, or exclusive mode with another user.",
                "ls -l /dev/nvidia*; start the container with GPUs"),
    FindingKind("order-differs", "warn", "CUDA counts GPUs in another order than nvidia-smi: {order}",
                "CUDA puts the fastest GPU first, NVML and nvidia-smi follow the bus. Indices of one are wrong in "
                "the other.",
                "export CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID"),
    FindingKind("pcie-width", "warn", "{gpu}: its link trained at x{width} of x{width_max}",
                "Fewer lanes than the card has: half the width is half the bandwidth. The slot, a riser, or "
                "bifurcation.",
                "reseat the card; check the slot's wiring and the BIOS: sudo lspci -vv -s {pci} | grep LnkSta"),
    FindingKind("pcie-gen", "info", "{gpu}: PCIe generation {gen} now, {gen_max} possible",
                "GPUs lower the link speed when idle; it matters only if it stays so under load.",
                "look again while something runs: nvidia-smi -q -i {pci} | grep -A3 'PCIe Generation'"),
    FindingKind("nvlink-down", "warn", "{gpu}: {down} of {slots} NVLinks are down",
                "A link that exists is not up: a bridge is loose, or the fabric manager has not trained it.",
                "nvidia-smi nvlink -s; reseat the bridge or restart nvidia-fabricmanager"),
    FindingKind("fabric-not-ready", "warn", "the NVSwitch fabric is {state} on {gpu}",
                "GPUs on NVSwitches work together only after the fabric manager has set up the switches.",
                "sudo systemctl status nvidia-fabricmanager (its version must be the driver's)"),
    FindingKind("acs-redirect", "warn", "ACS redirects peer traffic on {bridges}",
                "These PCIe bridges send GPU-to-GPU transfers up to the host: slower, and sometimes lost.",
                "turn ACS off in the BIOS, or per bridge as root: setpci -s {bridge} ECAP_ACS+6.w=0000"),
    FindingKind("iommu-translating", "warn", "the IOMMU translates PCIe addresses",
                "With translation on, peer transfers can be dropped or slow on many platforms.",
                "boot with iommu=pt (or amd_iommu=off, intel_iommu=off), then: moe_tk doctor --probe --no-cache"),
    FindingKind("wsl-limited", "info", "under WSL there is no peer access and little topology data",
                "The Windows driver offers neither GPU peer access nor the PCIe tree.",
                "nothing; use Linux on the metal for several GPUs"),
    FindingKind("virtual-machine", "info", "a virtual machine ({vm}): the PCIe path shown may not be the real one",
                "The hypervisor decides whether peer transfers pass; only a probe tells.",
                "moe_tk doctor --probe"),
    FindingKind("mig-slices", "info", "{count} MIG slices are visible: no peer access, data goes through host memory",
                "A slice owns part of a GPU (memory and SMs above are the slice's) and cannot address another one.",
                "use whole GPUs for several ranks; with one slice use one rank or the CPU backend"),
    FindingKind("mixed-models", "warn", "the visible GPUs differ: {models}",
                "The slowest GPU sets the pace, and a kernel built for one may not exist for another.",
                "choose equal GPUs with CUDA_VISIBLE_DEVICES"),
    FindingKind("arch-unsupported", "fail", "{gpu}: {arch} is older than sm_80",
                "The GPU kernels need tensor cores with bf16 (sm_80 or newer).", "use the CPU backend there"),
    FindingKind("memory-unknown", "info", "{gpu}: memory size unknown",
                "Neither NVML nor CUDA told the memory size, so estimates leave this GPU out.", "nothing"),
    FindingKind("no-multicast", "info", "multicast variants stay off: {why}",
                "Only the variants that use NVLink multicast need it; all others stay on.", "nothing"),
    FindingKind("failed-queries", "info", "{count} single queries failed and stay unknown (first: {first})",
                "Some drivers and GPUs do not answer every question; the report goes on without.",
                "moe_tk doctor --json lists them all"),
    FindingKind("bad-fork", "fail", "this process was forked after CUDA had been initialised",
                "CUDA cannot be used in such a process, whatever the GPUs are.",
                "start workers with the spawn method: multiprocessing.set_start_method('spawn')"),
    FindingKind("nvcc-missing", "warn", "no usable nvcc: {why}",
                "GPU kernels cannot be built here; modules built ahead still load.",
                "install a CUDA toolkit, set CUDA_HOME, or build ahead elsewhere: moe_tk build --arch 90a"),
    FindingKind("nvcc-torch-major", "fail", "{text}",
                "nvcc and torch come from different major versions of CUDA; such builds fail late.",
                "install the toolkit of torch's CUDA version, or set MOE_TK_ALLOW_CUDA_MISMATCH=1"),
    FindingKind("nvcc-headers-minor", "warn", "{text}",
                "The compiler and the CUDA headers have different minor versions.",
                "make both the same version: point CUDA_HOME at one complete toolkit"),
    FindingKind("tool-missing", "warn", "{what}: {why}", "Something that a build or a run uses is not there.", "{fix}"),
    FindingKind("torch-missing", "warn", "torch is not installed", "The layer needs torch; the doctor does not.",
                "python -m pip install torch"),
    FindingKind("torch-without-cuda", "warn", "torch {version} has no CUDA, but there are GPUs",
                "This build of torch only computes on the CPU.",
                "install a CUDA build of torch that fits the driver (CUDA {cuda} at most)"),
)

KINDS = {kind.id: kind for kind in _KINDS}
