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
        model.flash_attn = args.flash_attention
        context = llama.llama_context_default_params()
        context.flash_attn = args.flash_attention
        super().__init__(llama, args, model, context)

    def clear(self):
        llama.llama_kv_cache_clear(self.context)


def main():
    args = llama_measuring.arguments()
    llama_measuring.measure(IkLlamaCpp(args), args)


if __name__ == "__main__":
    main()
