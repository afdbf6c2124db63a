"""Times llama.cpp, through llama-cpp-python's C interface, on one GGUF file."""

import ctypes

from llama_cpp import llama_cpp as llama

import llama_measuring


class LlamaCpp(llama_measuring.Engine):
    def __init__(self, args):
        llama.llama_backend_init()
        quiet = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(quiet, ctypes.c_void_p(0))
        self.quiet = quiet
        model = llama.llama_model_default_params()
        model.use_extra_bufts = not args.no_repack
        context = llama.llama_context_default_params()
        context.flash_attn_type = 1 if args.flash_attention else 0
        super().__init__(llama, args, model, context)

    def clear(self):
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def wait(self):
        llama.llama_synchronize(self.context)


def main():
    args = llama_measuring.arguments()
    llama_measuring.measure(LlamaCpp(args), args)


if __name__ == "__main__":
    main()
