"""The families beyond the first: `families/<name>/`, one function here for each."""

import pathlib

from . import (
    bailing, check, cohere, deepseek, delta, dots, exaone, experts, falcon, fixture, gemma, glm, granite, hunyuan, layer_norms,
    lfm, llama, llama4, mamba,
    mellum, minimax, mistral, nemotron, olmo, phi, qwen, smollm,
)

FIXTURES = [
    gemma.gemma1, gemma.gemma2, gemma.gemma3, gemma.gemma3_multimodal, gemma.gemma3n, gemma.gemma4, gemma.gemma4_dense, gemma.gemma4_experts,
    mistral.mistral_window, mistral.ministral3, phi.phi3, phi.phi3_short, phi.phi4, phi.phi2,
    smollm.smollm3, olmo.olmo2, olmo.olmo3, granite.granite, granite.minicpm, cohere.command_r, cohere.cohere2, cohere.cohere2_moe, cohere.cohere2_moe_shared, exaone.exaone4, exaone.exaone_moe, glm.glm, glm.glm4,
    llama.llama_relu, llama.arcee, llama.ernie4_5, llama.seed_oss, llama.ministral, llama.exaone3, llama.internlm2,
    *layer_norms.FIXTURES, llama4.llama4_chunks, llama4.mobilellm,
    qwen.qwen3_yarn, qwen.qwen2_vl, qwen.qwen3_vl, *experts.FIXTURES,
    *deepseek.FIXTURES, *delta.FIXTURES, *lfm.FIXTURES, *mamba.FIXTURES,
    *nemotron.FIXTURES, *falcon.FIXTURES, *bailing.FIXTURES, *minimax.FIXTURES, *dots.FIXTURES,
    *mellum.FIXTURES, *hunyuan.FIXTURES,
]


def make(out: pathlib.Path) -> None:
    for describe in FIXTURES:
        made = describe()
        folder = out / "families" / made.name
        fixture.make(folder, made)
        check.check(folder)
