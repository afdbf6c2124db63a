//! Configurations as they were published, word for word of what families read: they leave out what libraries know,
//! which those that a library writes today do not.

mod runner;

use std::fs;

use lacuna_files::huggingface::Config;
use lacuna_files::{Mapping, ModelFiles};
use lacuna_models::spec::{Experts, FeedForward, LayerSpec, Mask, ModelSpec, RopeScaling};
use lacuna_models::{ConfigError, Description, describe};
use runner::folder;
use serde_json::{Value, json};

fn description(config: &Value) -> Result<ModelSpec, ConfigError> {
    let bytes = serde_json::to_vec(config).expect("JSON");
    let config = Config::parse(&bytes).expect("a configuration");
    Ok(Description::from_config(&config)?.spec)
}

/// The inner width of each layer's feed-forward block.
fn inner(spec: &ModelSpec) -> Vec<usize> {
    let inner = |feed_forward: &FeedForward| match feed_forward {
        FeedForward::Gated(block) => block.inner,
        other => panic!("a gated block, and not {other:?}"),
    };
    spec.layers
        .iter()
        .map(|layer| inner(&layer.feed_forward))
        .collect()
}

/// Folders of the Gemma 3 that see had been refused, each for what it leaves out.
#[test]
fn gemma_3_that_sees_is_described_by_what_differs_from_its_library() {
    let of_4b = json!({
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    });
    let of_12b = json!({
        "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text",
        "num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    });
    let of_27b = json!({
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    });
    for (text, heads, kv_heads, head_dim, scalar) in [
        (of_4b, 8, 4, 256, 256.0_f32),
        (of_12b, 16, 8, 256, 256.0),
        (of_27b, 32, 16, 128, 168.0),
    ] {
        let layers = text["num_hidden_layers"].as_u64().expect("a number") as usize;
        let config = json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
            "eoi_token_index": 256000, "image_token_index": 262144, "mm_tokens_per_image": 256,
            "text_config": text,
        });
        let spec = description(&config).expect("described");
        assert_eq!((spec.layers.len(), spec.vocabulary), (layers, 262_208));
        assert_eq!((spec.context_tokens, spec.norm.epsilon), (131_072, 1e-6));
        assert!(spec.ropes.iter().all(|rope| rope.dimensions == head_dim));
        assert_eq!(
            spec.ropes
                .iter()
                .map(|rope| rope.theta)
                .collect::<Vec<f64>>(),
            [1e6, 1e4]
        );
        assert!(matches!(spec.ropes[0].scaling, RopeScaling::Linear { .. }));
        assert!(matches!(spec.ropes[1].scaling, RopeScaling::None));
        for (index, layer) in spec.layers.iter().enumerate() {
            let attention = layer.attention.as_ref().expect("in every layer");
            assert_eq!(
                (attention.query_heads, attention.kv_heads),
                (heads, kv_heads)
            );
            assert_eq!(attention.scale, scalar.sqrt().recip());
            let windowed = matches!(attention.mask, Mask::Window(tokens) if tokens.get() == 1024);
            assert_eq!(windowed, index % 6 != 5, "layer {index}");
        }
    }
}

/// The first LFM2 say the width of feed-forward blocks by another name alone.
#[test]
fn the_first_lfm2_say_the_width_of_blocks_by_another_name() {
    let mut config = json!({
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2",
        "block_auto_adjust_ff_dim": true, "block_dim": 2048, "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5,
        "conv_L_cache": 3, "conv_bias": false, "conv_dim": 2048, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 2048, "max_position_embeddings": 128000, "norm_eps": 1e-5, "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1e6, "vocab_size": 65536,
    });
    let spec = description(&config).expect("described");
    assert_eq!(inner(&spec), [8192; 16]);
    let layers = spec.layers.iter().enumerate();
    let with_attention = layers.filter(|(_, layer)| layer.attention.is_some());
    let with_attention: Vec<usize> = with_attention.map(|(index, _)| index).collect();
    assert_eq!(with_attention, [2, 5, 8, 10, 12, 14]);
    // What it is told to leave as it is stays so, whatever the newer name says.
    config["block_auto_adjust_ff_dim"] = json!(false);
    config["intermediate_size"] = json!(1);
    assert_eq!(
        inner(&description(&config).expect("described")),
        [12_288; 16]
    );
    config["rope_theta"].take();
    let fields = config.as_object_mut().expect("an object");
    fields.remove("rope_theta");
    fields.remove("full_attn_idxs");
    let spec = description(&config).expect("described");
    assert_eq!(spec.ropes[0].theta, 1e6);
    assert!(spec.layers.iter().all(|layer| layer.attention.is_some()));
}

/// Qwen's folders name a window that is not used, which they need not say.
#[test]
fn a_window_that_qwen_does_not_say_is_used_is_not() {
    let mut config = json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "num_attention_heads": 14,
        "num_hidden_layers": 30, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "sliding_window": 4096, "tie_word_embeddings": true, "vocab_size": 151936,
    });
    let windowed = |config: &Value| {
        let spec = description(config).expect("described");
        let masks = spec.layers.iter().map(|layer| layer.mask());
        masks.filter(|mask| *mask != Some(Mask::Causal)).count()
    };
    assert_eq!(windowed(&config), 0);
    config["use_sliding_window"] = json!(true);
    assert_eq!(
        windowed(&config),
        2,
        "those after the first 28, as in the library"
    );
    config["max_window_layers"] = json!(21);
    assert_eq!(windowed(&config), 9);
    config["use_sliding_window"] = json!(false);
    assert_eq!(windowed(&config), 0);
}

/// Converters write a rotary base for layers with windows only where a configuration has one of its own.
#[test]
fn layers_of_olmo_3_turn_alike_where_a_file_has_one_base() {
    let bytes = fs::read(folder().join("families/olmo3/model.gguf")).expect("committed");
    let key = b"olmo2.rope.freq_base_swa";
    let at = bytes
        .windows(key.len())
        .position(|window| window == key)
        .expect("the key");
    let mut without = bytes.clone();
    without[at + key.len() - 1] = b'x';
    let ropes = |bytes: Vec<u8>| {
        let files = ModelFiles::from_gguf(Mapping::from(bytes)).expect("it is GGUF");
        describe(&files).expect("described").spec.ropes
    };
    let (with, without) = (ropes(bytes), ropes(without));
    assert_eq!(with[0], without[0]);
    assert_eq!(without[1].theta, without[0].theta);
    assert_eq!((with.len(), without.len()), (2, 2));
}

/// Decoders that embed texts may look ahead, and were computed as if they did not.
#[test]
fn a_decoder_that_looks_ahead_embeds_and_writes_nothing() {
    let from = folder().join("encoders/qwen3-embedding/hf");
    let to = tempfile::tempdir().expect("a scratch folder");
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(from.join(name), to.path().join(name)).expect("room");
    }
    let masks = || {
        let files = ModelFiles::open(to.path()).expect("a folder of a model");
        let spec = describe(&files).map_err(|error| error.to_string())?.spec;
        Ok::<_, String>(
            spec.layers
                .iter()
                .map(LayerSpec::mask)
                .collect::<Vec<Option<Mask>>>(),
        )
    };
    let modules = to.path().join("modules.json");
    let pooling = to.path().join("1_Pooling");
    fs::create_dir(&pooling).expect("room");
    let kinds = ["", "1_Pooling"].iter().zip(["Transformer", "Pooling"]);
    let kinds = kinds.map(|(path, kind)| json!({"path": path, "type": format!("sentence_transformers.models.{kind}")}));
    fs::write(&modules, json!(kinds.collect::<Vec<Value>>()).to_string()).expect("room");
    fs::write(pooling.join("config.json"), r#"{"pooling_mode": "mean"}"#).expect("room");
    assert!(
        masks()
            .expect("described")
            .iter()
            .all(|mask| *mask == Some(Mask::Causal))
    );
    let path = to.path().join("config.json");
    let config = fs::read(&path).expect("a configuration");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["is_causal"] = json!(false);
    fs::write(&path, config.to_string()).expect("room");
    assert!(
        masks()
            .expect("described")
            .iter()
            .all(|mask| *mask == Some(Mask::Full))
    );
    // Without what pools its rows, it would have to write text.
    fs::remove_file(modules).expect("a file");
    let refused = masks().expect_err("refused");
    assert!(
        refused.contains("attention to later tokens needs pooled output"),
        "{refused}"
    );
    // Nor is it known how far a window reaches to either side.
    config["use_sliding_window"] = json!(true);
    config["max_window_layers"] = json!(0);
    config["sliding_window"] = json!(4);
    config["layer_types"] = Value::Null;
    fs::write(&path, config.to_string()).expect("room");
    let refused = masks().expect_err("refused");
    assert!(refused.contains("layers with windows"), "{refused}");
}

/// The experts of a layer, where it has some.
fn experts(layer: &LayerSpec) -> Option<Experts> {
    match layer.feed_forward {
        FeedForward::Experts(experts) => Some(experts),
        _ => None,
    }
}

/// Ling mini 2.0, whose class takes half of each head to turn where that is not said.
#[test]
fn ling_turns_half_of_each_head_and_has_a_head_where_it_says_so() {
    let mut config = json!({
        "architectures": ["BailingMoeV2ForCausalLM"], "attention_dropout": 0.0, "num_hidden_layers": 20,
        "hidden_size": 2048, "intermediate_size": 5120, "first_k_dense_replace": 1, "hidden_act": "silu",
        "max_position_embeddings": 32768, "model_type": "bailing_moe", "moe_intermediate_size": 512,
        "norm_topk_prob": true, "num_experts_per_tok": 8, "num_attention_heads": 16, "num_experts": 256,
        "num_key_value_heads": 4, "rope_theta": 600_000, "rope_scaling": null, "tie_word_embeddings": false,
        "use_bias": false, "rms_norm_eps": 1e-6, "head_dim": 128, "num_shared_experts": 1, "use_qkv_bias": false,
        "vocab_size": 157_184, "partial_rotary_factor": 0.5, "moe_router_enable_expert_bias": true,
        "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "use_qk_norm": true,
        "score_function": "sigmoid", "moe_shared_expert_intermediate_size": 512,
    });
    let spec = description(&config).expect("described");
    assert_eq!((spec.layers.len(), spec.ropes[0].dimensions), (20, 64));
    let sparse: Vec<Option<Experts>> = spec.layers.iter().map(experts).collect();
    assert!(sparse[0].is_none());
    for experts in &sparse[1..] {
        let experts = experts.expect("in every layer but the first");
        let groups = experts.routing.groups.expect("groups");
        assert_eq!((experts.routing.experts, experts.routing.used), (256, 8));
        assert_eq!((groups.count, groups.used), (8, 4));
        assert_eq!(
            (experts.routing.normalized, experts.routing.scale),
            (true, 2.5)
        );
        let shared = experts.shared.expect("a block that all tokens have");
        assert_eq!((experts.inner, shared.inner), (512, 512));
    }
    let described = |config: &Value| {
        let bytes = serde_json::to_vec(config).expect("JSON");
        let config = Config::parse(&bytes).expect("a configuration");
        Description::from_config(&config).expect("described")
    };
    assert!(!described(&config).has_head());
    let fields = config.as_object_mut().expect("an object");
    fields.remove("partial_rotary_factor");
    fields.insert("num_nextn_predict_layers".to_owned(), json!(1));
    let with_head = described(&config);
    assert!(with_head.has_head());
    assert_eq!(with_head.spec.layers.len(), 20);
    assert_eq!(with_head.spec.ropes, spec.ropes);
    config["score_function"] = json!("softmax");
    let refused = description(&config).expect_err("refused").to_string();
    assert!(refused.contains("score_function softmax"), "{refused}");
}

/// MiniMax M2 says in elements how much of a head turns.
#[test]
fn minimax_says_in_elements_how_much_of_a_head_turns() {
    let mut config = json!({
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "vocab_size": 200_064,
        "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608, "num_local_experts": 256,
        "num_experts_per_tok": 8, "scoring_func": "sigmoid", "use_routing_bias": true, "use_mtp": true,
        "num_mtp_modules": 3, "mtp_transformer_layers": 1, "use_qk_norm": true, "qk_norm_type": "per_layer",
        "rotary_dim": 64, "rope_theta": 5_000_000, "rms_norm_eps": 1e-6, "shared_intermediate_size": 0,
        "hidden_act": "silu", "tie_word_embeddings": false,
    });
    let spec = description(&config).expect("described");
    assert_eq!((spec.ropes[0].dimensions, spec.ropes[0].theta), (64, 5e6));
    for layer in &spec.layers {
        let experts = experts(layer).expect("in every layer");
        assert_eq!((experts.inner, experts.shared), (1536, None));
        assert_eq!(
            (experts.routing.normalized, experts.routing.scale),
            (true, 1.0)
        );
    }
    // What the library has written says it as a part, which counts where both are there.
    config["rope_parameters"] =
        json!({"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.25});
    let spec = description(&config).expect("described");
    assert_eq!(spec.ropes[0].dimensions, 32);
    config["qk_norm_type"] = json!("per_head");
    let refused = description(&config).expect_err("refused").to_string();
    assert!(refused.contains("qk_norm_type per_head"), "{refused}");
}

/// K-EXAONE was published with other names for its class and for how many layers are dense.
#[test]
fn k_exaone_has_windows_and_positions_on_the_same_layers() {
    let kinds = ["sliding_attention"; 3]
        .into_iter()
        .chain(["full_attention"]);
    let kinds: Vec<&str> = kinds.cycle().take(48).collect();
    let config = json!({
        "architectures": ["ExaoneMoEForCausalLM"], "attention_dropout": 0.0, "first_last_k_dense_replace": 1,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 18432,
        "layer_types": kinds, "max_position_embeddings": 262_144, "model_type": "exaone_moe",
        "moe_intermediate_size": 2048, "n_group": 1, "norm_topk_prob": true, "num_attention_heads": 64,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-5, "rope_scaling": null,
        "rope_theta": 1_000_000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "sliding_window": 128,
        "sliding_window_pattern": "LLLG", "tie_word_embeddings": false, "topk_group": 1, "vocab_size": 153_600,
    });
    let spec = description(&config).expect("described");
    assert_eq!(spec.layers.len(), 48);
    for (index, layer) in spec.layers.iter().enumerate() {
        let attention = layer.attention.as_ref().expect("in every layer");
        let windowed = matches!(attention.mask, Mask::Window(tokens) if tokens.get() == 128);
        assert_eq!(windowed, index % 4 != 3, "layer {index}");
        assert_eq!(attention.rope.is_some(), windowed, "layer {index}");
        assert_eq!(experts(layer).is_some(), index > 0, "layer {index}");
    }
}

/// Hunyuan 3 counts the layers before those with experts, and has a head behind the last.
#[test]
fn hunyuan_3_counts_its_dense_layers_and_has_a_head() {
    let config = json!({
        "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "hidden_size": 4096, "intermediate_size": 13312,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "hidden_act": "silu", "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5, "vocab_size": 120_832,
        "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
        "expert_hidden_dim": 1536, "first_k_dense_replace": 1, "router_scaling_factor": 2.826, "route_norm": true,
        "qk_norm": true, "num_nextn_predict_layers": 1,
        "rope_parameters": {"rope_theta": 11_158_840.0, "rope_type": "default"},
    });
    let bytes = serde_json::to_vec(&config).expect("JSON");
    let config = Config::parse(&bytes).expect("a configuration");
    let described = Description::from_config(&config).expect("described");
    assert!(described.has_head());
    assert_eq!(described.spec.ropes[0].theta, 11_158_840.0);
    assert_eq!(described.spec.layers.len(), 80);
    for (index, layer) in described.spec.layers.iter().enumerate() {
        let routing = experts(layer).map(|experts| experts.routing);
        assert_eq!(routing.is_some(), index > 0, "layer {index}");
        assert!(routing.is_none_or(|routing| routing.normalized && routing.scale == 2.826));
    }
}
