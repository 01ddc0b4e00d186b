"""A pretended CUDA GPU for tests on machines without one.

Put this folder on PYTHONPATH and set

    FAKE_GPU            compute capability, e.g. "9.0". Without it this file does nothing.
    FAKE_GPU_NAME       default: a well-known card of that capability
    FAKE_GPU_COUNT      default 1
    FAKE_GPU_MEMORY_GB  default: that card's memory
    FAKE_GPU_CUDA       torch.version.cuda, default "13.0"
    FAKE_GPU_COMPILE    "0" makes torch.compile return its argument unchanged

torch then answers every question about CUDA as if such a card were there, while all tensors
live on the CPU: "cuda" is mapped to "cpu" wherever a device is given. tensor.device therefore
says "cpu". CUDA graphs raise, as there is nothing to capture. Nothing happens before torch is
imported, so other Python programs (pip, for one) start as fast as ever.
"""
import importlib.util
import os
import sys

CARDS = {  # capability: (name, memory in GB)
    "6.0": ("Tesla P100-PCIE-16GB", 16), "7.0": ("Tesla V100-SXM2-16GB", 16),
    "7.5": ("Tesla T4", 15), "8.0": ("NVIDIA A100-SXM4-40GB", 40),
    "8.6": ("NVIDIA GeForce RTX 3090", 24), "8.7": ("Orin", 32), "8.9": ("NVIDIA L4", 22),
    "9.0": ("NVIDIA H200", 140), "10.0": ("NVIDIA B200", 180), "10.3": ("NVIDIA B300", 270),
    "12.0": ("NVIDIA GeForce RTX 5090", 32),
}


class PatchTorchOnImport:
    """An import hook that calls install(torch) once torch has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None:
            run_module = spec.loader.exec_module

            def exec_module(module):
                run_module(module)
                install(module)

            spec.loader.exec_module = exec_module
        return spec


def install(torch):
    import contextlib
    import functools
    import gc
    import time
    import types

    capability = tuple(int(n) for n in os.environ["FAKE_GPU"].split("."))
    name, memory_gb = CARDS.get(os.environ["FAKE_GPU"], ("NVIDIA Unknown", 80))
    name = os.environ.get("FAKE_GPU_NAME", name)
    total = int(float(os.environ.get("FAKE_GPU_MEMORY_GB", memory_gb)) * 2**30)
    count = int(os.environ.get("FAKE_GPU_COUNT", "1"))

    # ---- Devices: "cuda" becomes "cpu" ----------------------------------------------------
    def cpu(device):
        if isinstance(device, int) and not isinstance(device, bool):
            return "cpu"
        kind = device.split(":")[0] if isinstance(device, str) else getattr(device, "type", None)
        return "cpu" if kind == "cuda" else device

    def on_cpu(args, kwargs):
        if "device" in kwargs:
            kwargs["device"] = cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return args, kwargs

    def patch(owner, attribute, first_argument_is_device=False):
        original = getattr(owner, attribute, None)
        if original is None:
            return

        @functools.wraps(original)
        def patched(*args, **kwargs):
            args, kwargs = on_cpu(args, kwargs)
            if first_argument_is_device:  # tensor.to(device, ...): only str and device are devices
                args = tuple(cpu(a) if isinstance(a, (str, torch.device)) or i == 1 and
                             isinstance(a, int) else a for i, a in enumerate(args))
            return original(*args, **kwargs)

        setattr(owner, attribute, patched)

    factories = """empty empty_permuted empty_strided ones arange eye full hann_window linspace
        logspace rand randn randint randperm sparse_coo_tensor tril_indices triu_indices zeros
        asarray tensor as_tensor scalar_tensor normal zeros_like ones_like full_like empty_like
        rand_like randn_like randint_like""".split()
    for function in factories:
        patch(torch, function)
    for method in "new_empty new_full new_ones new_tensor new_zeros new_empty_strided".split():
        patch(torch.Tensor, method)
    patch(torch.Tensor, "to", first_argument_is_device=True)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None

    class GeneratorMeta(type):
        def __instancecheck__(cls, instance):
            return isinstance(instance, torch._C.Generator)

    class Generator(metaclass=GeneratorMeta):
        def __new__(cls, device="cpu"):
            return torch._C.Generator(cpu(device))

    torch.Generator = Generator
    load = torch.load

    @functools.wraps(load)
    def load_on_cpu(f, map_location=None, **kwargs):
        return load(f, map_location=cpu(map_location), **kwargs)

    torch.load = load_on_cpu

    # ---- Autocast and GradScaler ----------------------------------------------------------
    # autocast("cuda") is a CPU autocast that also raises the CUDA flags which others ask for.
    autocast = torch.amp.autocast_mode.autocast
    autocast_init, enter, leave = autocast.__init__, autocast.__enter__, autocast.__exit__

    def init_autocast(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        self.asked_for_cuda = device_type == "cuda"
        if self.asked_for_cuda:
            device_type, dtype = "cpu", torch.float16 if dtype is None else dtype
        autocast_init(self, device_type, dtype, enabled, cache_enabled)

    def set_cuda_flags(enabled, dtype):
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)

    def enter_autocast(self):
        if self.asked_for_cuda:
            self.cuda_flags = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
            set_cuda_flags(self._enabled, self.fast_dtype)
        return enter(self)

    def leave_autocast(self, *exception):
        if self.asked_for_cuda:
            set_cuda_flags(*self.cuda_flags)
        return leave(self, *exception)

    autocast.__init__, autocast.__enter__, autocast.__exit__ = (
        init_autocast, enter_autocast, leave_autocast)

    scaler_init = torch.amp.GradScaler.__init__

    def init_scaler(self, device="cuda", *args, **kwargs):
        scaler_init(self, cpu(device), *args, **kwargs)

    torch.amp.GradScaler.__init__ = init_scaler

    # ---- Optimizers: capturable=True is accepted -------------------------------------------
    devices = sys.modules["torch.optim.optimizer"]._get_capturable_supported_devices

    def supported_devices(*args, **kwargs):
        return [*devices(*args, **kwargs), "cpu"]

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.optim") and \
                hasattr(module, "_get_capturable_supported_devices"):
            module._get_capturable_supported_devices = supported_devices

    # ---- Streams, events, graphs ----------------------------------------------------------
    class Stream:
        def __init__(self, device=None, priority=0, **kwargs):
            self.device, self.cuda_stream = torch.device("cuda", 0), 0

        def synchronize(self):
            pass

        wait_stream = wait_event = lambda self, other: None
        query = lambda self: True

        def record_event(self, event=None):
            event = event or Event()
            event.record()
            return event

    class Event:
        def __init__(self, enable_timing=False, **kwargs):
            self.time, self.timing = None, enable_timing

        def record(self, stream=None):
            self.time = time.perf_counter()

        def elapsed_time(self, end):
            if not (self.timing and end.timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if self.time is None or end.time is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            return (end.time - self.time) * 1000.0

        synchronize = wait = lambda self, *args: None
        query = lambda self: True

    def no_graph(*args, **kwargs):
        raise RuntimeError("stand-in: no CUDA graphs here")

    NoGraph = type("CUDAGraph", (), {"__init__": no_graph})

    # ---- Memory: the bytes of all tensors that Python can see ------------------------------
    peak = [0]

    def memory_allocated(device=None):
        storages = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                with contextlib.suppress(Exception):
                    storage = thing.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        allocated = sum(storages.values())
        peak[0] = max(peak[0], allocated)
        return allocated

    def max_memory_allocated(device=None):
        memory_allocated()
        return peak[0]

    def reset_peak(device=None):
        peak[0] = 0
        memory_allocated()

    def memory_stats(device=None):
        now, most = memory_allocated(), max_memory_allocated()
        return {f"{kind}_bytes.all.{when}": value for kind in ("allocated", "reserved", "active")
                for when, value in (("current", now), ("peak", most))}

    # ---- torch.cuda -------------------------------------------------------------------------
    def index(device=None):
        i = device if isinstance(device, int) else torch.device(device or "cuda").index or 0
        if not 0 <= i < count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return i

    def properties(device=None):
        index(device)
        return types.SimpleNamespace(
            name=name, major=capability[0], minor=capability[1], total_memory=total,
            multi_processor_count=132, is_integrated=0, is_multi_gpu_board=0, warp_size=32,
            max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
            shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
            shared_memory_per_multiprocessor=233472, L2_cache_size=60 * 2**20, gcnArchName="",
            uuid="00000000-0000-0000-0000-000000000000")

    def nothing(*args, **kwargs):
        return None

    class device_context(contextlib.nullcontext):
        def __init__(self, device=None):
            super().__init__()

    stream = Stream()
    arches = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
    answers = {
        "is_available": lambda: count > 0, "device_count": lambda: count,
        "is_initialized": lambda: True, "init": nothing, "_lazy_init": nothing,
        "current_device": lambda: 0, "set_device": lambda device: index(device) and None,
        "get_device_properties": properties, "get_device_name": lambda d=None: properties(d).name,
        "get_device_capability": lambda d=None: (index(d), capability)[1],
        "get_arch_list": lambda: arches, "get_gencode_flags": lambda: "",
        "is_bf16_supported": lambda including_emulation=True:
            capability >= (8, 0) or including_emulation,
        "is_tf32_supported": lambda: capability >= (8, 0),
        "mem_get_info": lambda device=None: (total - memory_allocated(), total),
        "memory_allocated": memory_allocated, "max_memory_allocated": max_memory_allocated,
        "memory_reserved": memory_allocated, "max_memory_reserved": max_memory_allocated,
        "memory_stats": memory_stats, "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak, "reset_accumulated_memory_stats": nothing,
        "empty_cache": nothing, "ipc_collect": nothing, "synchronize": nothing,
        "set_per_process_memory_fraction": nothing, "memory_summary": lambda *a, **k: "",
        "manual_seed": torch.manual_seed, "manual_seed_all": nothing, "seed": nothing,
        "seed_all": nothing, "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "Stream": Stream, "ExternalStream": Stream, "Event": Event,
        "stream": device_context, "StreamContext": device_context, "set_stream": nothing,
        "current_stream": lambda device=None: stream, "default_stream": lambda device=None: stream,
        "device": device_context, "device_of": device_context,
        "is_current_stream_capturing": lambda: False, "CUDAGraph": NoGraph, "graph": no_graph,
        "graph_pool_handle": no_graph, "make_graphed_callables": no_graph,
        "current_blas_handle": lambda: 0, "utilization": lambda device=None: 0,
        "can_device_access_peer": lambda a, b: True,
    }
    def own(answer):  # torch.compile's tables want another object for each name
        if isinstance(answer, type):
            return type(answer.__name__, (answer,), {})
        return lambda *args, **kwargs: answer(*args, **kwargs)

    for attribute, answer in answers.items():
        answer = own(answer)
        for submodule in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams,
                          torch.cuda.graphs):
            if submodule is torch.cuda or hasattr(submodule, attribute):
                setattr(submodule, attribute, answer)
    for function in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, function, own(nothing))
    torch.cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()
    torch.version.cuda = os.environ.get("FAKE_GPU_CUDA", "13.0")
    torch.backends.cuda.is_built = lambda: True
    torch.backends.cudnn.version = lambda: 91900
    torch.backends.cudnn.is_available = lambda: True

    def scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None,
                  use_fast_accum=False):
        if capability < (8, 9):
            raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute "
                               "capability >= 9.0 or 8.9, or ROCm MI300+")
        out = (a.float() * scale_a) @ (b.float() * scale_b)
        return (out if bias is None else out + bias).to(out_dtype or torch.float32)

    torch._scaled_mm = scaled_mm

    # ---- NCCL becomes Gloo ------------------------------------------------------------------
    if torch.distributed.is_available():
        start = torch.distributed.init_process_group

        def init_process_group(backend=None, *args, **kwargs):
            kwargs.pop("device_id", None)
            return start("gloo", *args, **kwargs)

        torch.distributed.init_process_group = init_process_group
        torch.distributed.is_nccl_available = lambda: True

    # ---- optimizers: a torch built for CUDA would ask the driver whether a graph is being captured ----
    for method in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):
        if hasattr(torch.optim.Optimizer, method):
            setattr(torch.optim.Optimizer, method, nothing)

    # ---- torch.compile ----------------------------------------------------------------------
    if os.environ.get("FAKE_GPU_COMPILE") == "0":
        def compile(model=None, **kwargs):
            return (lambda function: function) if model is None else model

        torch.compile = compile
        torch.compiler.reset = nothing
        torch.nn.Module.compile = nothing


if os.environ.get("FAKE_GPU"):
    sys.meta_path.insert(0, PatchTorchOnImport())
