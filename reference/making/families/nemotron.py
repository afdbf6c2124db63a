"""Nemotron-H: layers that are Mamba-2, attention, or a feed-forward block without gates; with experts, and with
experts that read something narrower than the residual stream."""

import gguf
from transformers import NemotronHConfig

from .experts import EXPERTS, stacked
from .fixture import SMALL, Fixture, Tensors
from .mamba import CENTERS, GROUPS, HEAD_DIM, HEADS, STATE, TAPS, of_state, state_tensor

LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
PARTS = {
    "q_proj.weight": "attn_q.weight", "k_proj.weight": "attn_k.weight", "v_proj.weight": "attn_v.weight",
    "o_proj.weight": "attn_output.weight", "up_proj.weight": "ffn_up.weight", "down_proj.weight": "ffn_down.weight",
    "gate.weight": "ffn_gate_inp.weight", "gate.e_score_correction_bias.weight": "exp_probs_b.bias",
    "experts.up_proj.weight": "ffn_up_exps.weight", "experts.down_proj.weight": "ffn_down_exps.weight",
    "shared_experts.up_proj.weight": "ffn_up_shexp.weight", "shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "fc1_latent_proj.weight": "ffn_latent_down.weight", "fc2_latent_proj.weight": "ffn_latent_up.weight",
}


def convert(tensors: Tensors) -> Tensors:
    made: Tensors = {}
    for name, values in stacked(tensors).items():
        _, _, part = name.partition(".mixer.")
        layer = name.split("layers.")[-1].split(".")[0]
        if not part:
            made[name] = values
        elif part in PARTS:
            made[f"blk.{layer}.{PARTS[part]}"] = values
        else:
            part, values = state_tensor(part, values)
            made[f"blk.{layer}.{part}"] = values.astype("float32")
    return made


def parameters(writer: gguf.GGUFWriter, config: dict) -> None:
    kinds, heads = config["layers_block_type"], config["num_key_value_heads"]
    experts = "moe" in kinds
    block, width = ("moe", config["moe_intermediate_size"]) if experts else ("mlp", config["intermediate_size"])
    writer.add_context_length(2**20)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_scaling_finetuned(False)
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_feed_forward_length([width if kind == block else 0 for kind in kinds])
    of_state(writer)
    if not experts:
        return
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    if config["moe_latent_size"] is not None:
        writer.add_moe_latent_size(config["moe_latent_size"])


def old_spelling(config: dict) -> dict:
    """As the first of them were published: a letter for each layer, and infinity as Python writes it."""
    kinds = config.pop("layers_block_type")
    config["hybrid_override_pattern"] = "".join(LETTERS[kind] for kind in kinds)
    config["num_hidden_layers"] = len(kinds)
    config["time_step_limit"] = [0.0, float("inf")]
    return config


def described(name: str, seed: int, kinds: list[str], latent: int | None = None) -> Fixture:
    config = NemotronHConfig(
        **SMALL, architectures=["NemotronHForCausalLM"], hidden_size=32, layers_block_type=kinds, head_dim=8,
        intermediate_size=24, mamba_num_heads=HEADS, mamba_head_dim=HEAD_DIM, ssm_state_size=STATE, n_groups=GROUPS,
        conv_kernel=TAPS, chunk_size=16, layer_norm_epsilon=1e-5, tie_word_embeddings=False,
        # transformers holds time steps above `time_step_min` in prompts alone; as published, nothing does.
        time_step_min=1e-30,
        n_routed_experts=EXPERTS, num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=20, moe_latent_size=latent, routed_scaling_factor=1.5, n_group=4,
        topk_group=2, norm_topk_prob=True,
    )
    experts = "moe" in kinds
    architecture = gguf.MODEL_ARCH.NEMOTRON_H_MOE if experts else gguf.MODEL_ARCH.NEMOTRON_H
    return Fixture(
        name, config, seed, architecture, parameters, convert, says_heads=True, centers=CENTERS, tokens=150,
        old_spelling=None if latent else old_spelling, casts_by_type=experts,
    )


def nemotron_h() -> Fixture:
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
    return described("nemotron-h", 188, kinds)


def nemotron_h_moe() -> Fixture:
    return described("nemotron-h-moe", 189, ["linear_attention", "moe", "full_attention", "moe", "linear_attention"])


def nemotron_h_latent() -> Fixture:
    return described("nemotron-h-latent", 190, ["linear_attention", "full_attention", "moe"], latent=16)


FIXTURES = [nemotron_h, nemotron_h_moe, nemotron_h_latent]
