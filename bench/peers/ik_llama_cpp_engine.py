"""Times ik_llama.cpp, through ik-llama-cpp-python's C interface, on one GGUF file."""

from ik_llama_cpp import _ctypes_api as llama

import llama_measuring


class IkLlamaCpp(llama_measuring.Engine):
    def __init__(self, args):
        llama.llama_backend_init()
        model = llama.llama_model_default_params()
        # Rows are interleaved while loading, in memory of its own.
        model.repack_tensors = not args.no_repack
        model.use_mmap = args.no_repack
        model.n_gpu_layers = 0
        model.flash_attn = args.flash_attention
        model = llama.llama_model_load_from_file(args.model.encode(), model)
        assert model, f"ik_llama.cpp cannot load {args.model}"
        context = llama.llama_context_default_params()
        llama_measuring.context_settings(context, args)
        context.flash_attn = args.flash_attention
        context = llama.llama_init_from_model(model, context)
        assert context, "ik_llama.cpp refuses these settings"
        super().__init__(llama, model, context)

    def clear(self):
        llama.llama_kv_cache_clear(self.context)


def main():
    args = llama_measuring.arguments()
    llama_measuring.measure(IkLlamaCpp(args), args)


if __name__ == "__main__":
    main()
