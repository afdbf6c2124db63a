//! Synthetic models: deterministic, of the right size, sane in every element type.

use std::collections::HashSet;
use std::num::NonZeroUsize;

use lacuna_kernels::{Cpu, CpuConfig, ElementType, Matrix, Routes};
use lacuna_kv::{KvCache, KvElements, KvPolicy};
use ring::digest;

use super::vocabulary::Vocabulary;
use super::*;
use crate::plan::ArenaPlan;
use crate::program::Op;
use crate::spec::FeedForward;
use crate::{BatchLimits, LogitRows, Scratch, Segment};
use lacuna_files::{Mapping, Metadata, ModelFiles};

/// As small as a shape with a real vocabulary can be.
const TINY: Shape = Shape {
    name: "tiny",
    layers: 2,
    hidden: 32,
    feed_forward: 64,
    heads: 4,
    kv_heads: 2,
    head_size: 16,
    family: "qwen3",
    vocabulary: 151_936,
    special_tokens: Some(SpecialTokens::Qwen),
    tied: true,
    context: 40_960,
    rope_theta: 1e6,
    rope_factor: None,
    norm_epsilon: 1e-6,
    more: &[],
};
static TINY_LLAMA: Shape = Shape {
    name: "tiny-llama",
    family: "llama",
    special_tokens: Some(SpecialTokens::Llama3),
    vocabulary: 128_256,
    tied: false,
    rope_theta: 5e5,
    rope_factor: Some(32.0),
    ..TINY
};
static TINY_QWEN: Shape = TINY;
static TINY_EXPERTS: Shape = Shape {
    name: "tiny-qwen3moe",
    family: "qwen3moe",
    more: &EXPERTS,
    ..TINY
};
static TINY_GPT_OSS: Shape = Shape {
    name: "tiny-gpt-oss",
    family: "gpt-oss",
    more: &EXPERTS,
    ..TINY
};
static TINY_LATENT: Shape = Shape {
    name: "tiny-latent",
    family: "deepseek2",
    kv_heads: 1,
    head_size: 96,
    more: &[
        ("attention.value_length", Given::Size(64)),
        ("attention.key_length_mla", Given::Size(64)),
        ("attention.value_length_mla", Given::Size(32)),
        ("attention.kv_lora_rank", Given::Size(64)),
        ("attention.q_lora_rank", Given::Size(96)),
        ("rope.dimension_count", Given::Size(32)),
    ],
    ..TINY
};
static TINY_HYBRID: Shape = Shape {
    name: "tiny-hybrid",
    family: "nemotron_h",
    layers: 4,
    special_tokens: Some(SpecialTokens::ChatMl),
    vocabulary: 4096,
    more: &[
        ("attention.head_count_kv", Given::PerLayer(&[0, 2, 0])),
        ("feed_forward_length", Given::PerLayer(&[0, 0, 64])),
        ("ssm.conv_kernel", Given::Size(4)),
        ("ssm.state_size", Given::Size(16)),
        ("ssm.group_count", Given::Size(2)),
        ("ssm.time_step_rank", Given::Size(4)),
        ("ssm.inner_size", Given::Size(64)),
    ],
    ..TINY
};
const EXPERTS: [(&str, Given); 3] = [
    ("expert_count", Given::Size(4)),
    ("expert_used_count", Given::Size(2)),
    ("expert_feed_forward_length", Given::Size(32)),
];

#[test]
fn random_blocks_are_finite_centred_and_as_wide_as_asked_for() {
    for dtype in DType::ALL {
        for deviation in [1.0, 1.0 / 32.0, 1.0 / 120.0] {
            let mut bytes = vec![0; 65_536 / dtype.block_len() * dtype.block_bytes()];
            Generator::new(7, 3).fill(dtype, deviation, &mut bytes);
            let mut values = vec![0.0; 65_536];
            let row = Matrix::new(dtype, 1, values.len(), &bytes).unwrap();
            row.dequantize_row(0, &mut values);
            assert!(
                values.iter().all(|value| value.abs() < 6.0 * deviation),
                "{dtype}"
            );
            let count = values.len() as f32;
            let mean = values.iter().sum::<f32>() / count;
            let square = values.iter().map(|value| value * value).sum::<f32>() / count;
            assert!(
                mean.abs() < 0.03 * deviation,
                "{dtype}: mean {mean} at {deviation}"
            );
            let ratio = square.sqrt() / deviation;
            assert!(
                (0.97..1.03).contains(&ratio),
                "{dtype}: deviation is {ratio} of {deviation}"
            );
        }
    }
}

#[test]
fn bytes_of_q8_0_are_never_minus_128() {
    let mut bytes = vec![0; 34 * 4096];
    Generator::new(0, 0).fill(DType::Q8_0, 1.0, &mut bytes);
    assert!(
        bytes
            .chunks_exact(34)
            .all(|block| block[2..].iter().all(|&byte| byte != 0x80))
    );
}

#[test]
fn the_same_seed_gives_the_same_file_and_another_seed_another() {
    let model = Model::new(&TINY_QWEN, DType::Q4_0);
    let bytes = model.clone().write_to(Vec::new()).unwrap();
    assert_eq!(bytes.len() as u64, model.file_len().unwrap());
    assert!(bytes == model.clone().write_to(Vec::new()).unwrap());
    assert!(bytes != model.seed(1).write_to(Vec::new()).unwrap());
    // Benchmarks of different versions compare only if this never changes.
    let hash = digest::digest(&digest::SHA256, &bytes);
    let hash: String = hash.as_ref()[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(hash, "f4b101958be5fb42");
}

#[test]
fn what_is_written_opens_as_a_model() {
    let bytes = Model::new(&TINY_LLAMA, DType::Q8_0)
        .write_to(Vec::new())
        .unwrap();
    let files = ModelFiles::from_gguf(Mapping::from(bytes)).unwrap();
    let Metadata::Gguf(metadata) = files.metadata() else {
        panic!("not GGUF")
    };
    assert_eq!(
        metadata.require::<&str>("general.architecture").unwrap(),
        "llama"
    );
    assert_eq!(metadata.require::<usize>("llama.block_count").unwrap(), 2);
    let tensors = files.tensors();
    for (name, shape) in [
        ("token_embd.weight", vec![128_256, 32]),
        ("output.weight", vec![128_256, 32]),
        ("blk.1.attn_q.weight", vec![64, 32]),
        ("blk.1.attn_v.weight", vec![32, 32]),
        ("blk.1.attn_output.weight", vec![32, 64]),
        ("blk.0.ffn_down.weight", vec![32, 64]),
        ("output_norm.weight", vec![32]),
        ("rope_freqs.weight", vec![8]),
    ] {
        assert!(tensors.require_shape(name, &shape).is_ok(), "{name}");
    }
    assert_eq!(tensors.len(), 4 + 2 * 9);
    let norm = tensors.require("output_norm.weight").unwrap();
    assert!(
        norm.bytes()
            .chunks(4)
            .all(|bytes| bytes == 1.0f32.to_le_bytes())
    );
}

#[test]
fn a_model_is_described_as_its_file_is() {
    for shape in [
        &TINY_LLAMA,
        &TINY_QWEN,
        &TINY_EXPERTS,
        &TINY_GPT_OSS,
        &TINY_LATENT,
        &TINY_HYBRID,
    ] {
        let model = Model::new(shape, DType::Q8_0);
        let bytes = model.clone().write_to(Vec::new()).unwrap();
        let files = ModelFiles::from_gguf(Mapping::from(bytes)).unwrap();
        let opened = crate::describe(&files).unwrap();
        assert_eq!(model.description().unwrap().spec, opened.spec);
        let found = WeightPlan {
            in_files: true,
            ..WeightPlan::of(files.tensors(), &opened)
        };
        assert_eq!(model.weights().unwrap(), found);
        crate::Model::load(files).expect("every tensor is found, and none is too many");
    }
}

#[test]
fn lists_by_layer_are_cut_or_begun_again_for_other_numbers_of_layers() {
    for (layers, expected) in [(2, "sa"), (3, "saf"), (5, "safsa")] {
        let model = Model::new(&TINY_HYBRID, DType::Q8_0);
        let model = model.layers(layers).unwrap();
        let spec = model.description().unwrap().spec;
        let kinds = spec.layers.iter().map(|layer| {
            let parts = [
                layer.recurrence.is_some(),
                layer.attention.is_some(),
                layer.feed_forward != FeedForward::None,
            ];
            match parts {
                [true, false, false] => 's',
                [false, true, false] => 'a',
                [false, false, true] => 'f',
                parts => panic!("{parts:?}"),
            }
        });
        assert_eq!(kinds.collect::<String>(), expected);
    }
}

#[test]
fn rotation_factors_are_those_of_published_files() {
    let shape = Shape::find("llama-3.2-1b").unwrap();
    let model = Model::new(shape, DType::Q8_0).layers(1).unwrap();
    let tensors = model.tensors().unwrap();
    let Contents::Given(factors) = &tensors[0].contents else {
        panic!("not given")
    };
    assert_eq!(
        (tensors[0].name.as_str(), factors.len()),
        ("rope_freqs.weight", 32)
    );
    assert!(factors[..15].iter().all(|&factor| factor == 1.0));
    assert!(factors[18..].iter().all(|&factor| factor == 32.0));
    assert!(
        factors[15..18]
            .iter()
            .all(|&factor| (1.0..32.0).contains(&factor)),
        "{factors:?}"
    );
}

#[test]
fn every_shape_has_the_published_number_of_parameters() {
    let millions = |name| {
        let shape = Shape::find(name).unwrap();
        let tensors = Model::new(shape, DType::F32).tensors().unwrap();
        let elements: usize = tensors
            .iter()
            .map(|tensor| tensor.shape.iter().product::<usize>())
            .sum();
        elements / 1_000_000
    };
    let published = [
        ("qwen3-0.6b", 596),
        ("qwen3-1.7b", 1720),
        ("qwen3-4b", 4022),
        ("qwen3-8b", 8190),
        ("qwen2.5-0.5b", 494),
        ("llama-3.2-1b", 1235),
        ("llama-3.2-3b", 3212),
        ("llama-3-8b", 8030),
        ("llama-3-70b", 70_553),
        ("llama-3-405b", 405_853),
        ("gemma3-270m", 268),
        ("gemma3-1b", 999),
        ("gemma3-4b", 3880),
        ("qwen3-30b-a3b", 30_532),
        // Those of the text, which no model card counts: by hand, from their `config.json`.
        ("qwen3.5-0.8b", 752),
        ("qwen3.5-4b", 4205),
        ("qwen3.5-9b", 8953),
        ("gpt-oss-20b", 20_914),
        ("deepseek-v2-lite", 15_706),
        ("glm-4.7-flash", 29_943),
        ("ling-mini-2", 16_255),
        ("lfm2-1.2b", 1170),
        ("granite-4-h-tiny", 6939),
        ("nemotron-3-nano-30b-a3b", 31_577),
        ("falcon-h1-1.5b", 1554),
        // Of no published model: 2013 in the table of its layers' inputs.
        ("gemma4-e-table", 2502),
        // Nor this.
        ("relu2-1b", 1191),
        ("gemma3n-sparse-1b", 1236),
    ];
    assert_eq!(published.len(), shapes().count());
    for (name, expected) in published {
        assert_eq!(millions(name), expected, "{name}");
    }
}

#[test]
fn vocabularies_have_the_real_size_and_their_merges_hold() {
    for (kind, size) in [
        (SpecialTokens::Qwen, 151_936),
        (SpecialTokens::Llama3, 128_256),
        (SpecialTokens::DeepSeek, 102_400),
        (SpecialTokens::ChatMl, 65_536),
    ] {
        let vocabulary = Vocabulary::of(kind, size);
        assert_eq!(
            (vocabulary.tokens.len(), vocabulary.types.len()),
            (size, size)
        );
        let known: HashSet<&str> = vocabulary.tokens.iter().map(String::as_str).collect();
        assert_eq!(known.len(), size, "every token occurs once");
        assert!(vocabulary.merges.len() > 500);
        for merge in &vocabulary.merges {
            let (left, right) = merge.split_once(' ').unwrap();
            assert!(
                [left, right, &format!("{left}{right}")]
                    .iter()
                    .all(|part| known.contains(part)),
                "{merge}"
            );
        }
    }
}

#[test]
fn special_tokens_have_their_real_numbers() {
    let qwen = Vocabulary::of(SpecialTokens::Qwen, 151_936).tokens;
    assert_eq!(
        (qwen[0].as_str(), qwen[188].as_str(), qwen[220].as_str()),
        ("!", "\u{100}", "\u{120}")
    );
    assert_eq!(
        (qwen[151_643].as_str(), qwen[151_645].as_str()),
        ("<|endoftext|>", "<|im_end|>")
    );
    assert_eq!(
        (qwen[151_668].as_str(), qwen[151_669].as_str()),
        ("</think>", "[PAD151669]")
    );
    let llama = Vocabulary::of(SpecialTokens::Llama3, 128_256).tokens;
    assert_eq!(
        (llama[128_000].as_str(), llama[128_009].as_str()),
        ("<|begin_of_text|>", "<|eot_id|>")
    );
    assert_eq!(llama[128_005], "<|reserved_special_token_2|>");
    assert_eq!(llama[128_255], "<|reserved_special_token_247|>");
}

#[test]
fn what_cannot_be_made_says_what_can() {
    let error = Shape::find("gpt-5").unwrap_err();
    assert!(
        error.to_string().contains("qwen3-0.6b, qwen3-1.7b"),
        "{error}"
    );
    let model = Model::new(Shape::find("qwen2.5-0.5b").unwrap(), DType::Q4K);
    let error = model.file_len().unwrap_err();
    assert!(matches!(&error, Error::Blocks { columns: 896, .. }));
    assert!(
        error.to_string().contains("use a type with smaller blocks"),
        "{error}"
    );
    let model = Model::new(&TINY_QWEN, DType::F32);
    assert!(matches!(model.clone().layers(0), Err(Error::Layers { .. })));
    assert!(matches!(model.layers(1 << 40), Err(Error::Layers { .. })));
}

/// A disk with room for so many bytes.
struct Disk(usize);

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.checked_sub(bytes.len()) {
            Some(left) => self.0 = left,
            None => return Err(io::ErrorKind::StorageFull.into()),
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_disk_is_a_typed_error() {
    let error = Model::new(&TINY_QWEN, DType::Q8_0)
        .write_to(Disk(6_000_000))
        .err()
        .unwrap();
    assert!(
        matches!(error, Error::DiskFull { needed, .. } if needed > 6_000_000),
        "{error}"
    );
}

#[test]
fn a_file_appears_only_when_it_is_complete() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let model = Model::new(&TINY_QWEN, DType::Q4_0).layers(1).unwrap();
    model.write_file(&path, &mut ()).unwrap();
    assert_eq!(
        std::fs::metadata(&path).unwrap().len(),
        model.file_len().unwrap()
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

    let occupied = folder.path().join("occupied");
    std::fs::create_dir_all(occupied.join("by a folder")).unwrap();
    assert!(matches!(
        model.write_file(&occupied, &mut ()),
        Err(Error::Write { .. })
    ));
    assert!(!folder.path().join("occupied.part").exists());
    let nowhere = folder.path().join("none/tiny.gguf");
    assert!(matches!(
        model.write_file(&nowhere, &mut ()),
        Err(Error::Write { .. })
    ));
}

/// As many experts and columns as it takes for their choices to be like those of a whole model.
static ROUTED_QWEN: Shape = Shape {
    name: "routed-qwen3moe",
    family: "qwen3moe",
    layers: 4,
    hidden: 256,
    heads: 8,
    head_size: 32,
    more: &[
        ("expert_count", Given::Size(128)),
        ("expert_used_count", Given::Size(8)),
        ("expert_feed_forward_length", Given::Size(64)),
    ],
    ..TINY
};
static ROUTED_GPT_OSS: Shape = Shape {
    name: "routed-gpt-oss",
    family: "gpt-oss",
    special_tokens: Some(SpecialTokens::Qwen),
    more: &[
        ("expert_count", Given::Size(32)),
        ("expert_used_count", Given::Size(4)),
        ("expert_feed_forward_length", Given::Size(64)),
    ],
    ..ROUTED_QWEN
};

/// The experts of each token, layer by layer.
fn choices(shape: &'static Shape, seed: u64, tokens: &[u32]) -> Vec<Vec<Vec<u32>>> {
    let model = Model::new(shape, DType::Q8_0).seed(seed);
    let bytes = model.write_to(Vec::new()).unwrap();
    let files = ModelFiles::from_gguf(Mapping::from(bytes)).unwrap();
    let model = crate::Model::load(files).unwrap();
    let cpu = Cpu::new(CpuConfig {
        threads: NonZeroUsize::MIN,
        ..CpuConfig::default()
    })
    .unwrap();
    let limits = BatchLimits {
        tokens: tokens.len(),
        logit_rows: 1,
        context_tokens: tokens.len(),
    };
    let elements = KvElements::both(ElementType::F32);
    let geometry = model.spec().kv_geometry(elements).unwrap();
    let plan = ArenaPlan::new(model.program(), limits).unwrap();
    let mut scratch = Scratch::new(model.program(), plan).unwrap();
    let cache = KvCache::new(geometry, KvPolicy::default()).unwrap();
    let mut sequence = cache.sequence(tokens.len()).unwrap();
    sequence.prepare(tokens.len()).unwrap();
    let mut segments = [Segment {
        tokens,
        sequence: &mut sequence,
        logits: LogitRows::Last,
        images: &[],
    }];
    let mut pass = model.pass(&cpu, &mut segments, &mut scratch).unwrap();
    let (program, mut layers) = (model.program(), Vec::new());
    for op in program.steps().iter().flat_map(|step| program.ops(step)) {
        pass.op(op).unwrap();
        if let Op::Route {
            routing, routes, ..
        } = op
        {
            let [words] = pass.scratch.slots([*routes]);
            let words = bytemuck::cast_slice(words);
            let routes = Routes::new(words, tokens.len(), routing);
            let of = |token| routes.experts(token).to_vec();
            layers.push((0..tokens.len()).map(of).collect());
        }
    }
    layers
}

/// The part of a layer's experts that a token has of the token before.
fn reused(layer: &[Vec<u32>]) -> f64 {
    let pairs = layer.windows(2).map(|two| {
        let again = two[1].iter().filter(|expert| two[0].contains(expert));
        again.count() as f64 / two[1].len() as f64
    });
    pairs.sum::<f64>() / (layer.len() - 1) as f64
}

/// The part of all choices that falls on the quarter of the experts that is chosen most.
fn on_a_quarter(layer: &[Vec<u32>], experts: usize) -> f64 {
    let mut counts = vec![0; experts];
    for expert in layer.iter().flatten() {
        counts[*expert as usize] += 1;
    }
    counts.sort_unstable();
    let most: i32 = counts[experts - experts / 4..].iter().sum();
    f64::from(most) / f64::from(counts.iter().sum::<i32>())
}

#[test]
fn routers_prefer_some_experts_and_a_token_reuses_about_45_percent_of_those_before() {
    let tokens: Vec<u32> = (0..96).map(|i| 1000 + 977 * i).collect();
    let mut parts = Vec::new();
    for (shape, experts) in [(&ROUTED_QWEN, 128), (&ROUTED_GPT_OSS, 32)] {
        for seed in [1, 2] {
            let layers = choices(shape, seed, &tokens);
            assert_eq!(layers.len(), shape.layers);
            for layer in &layers {
                parts.push(reused(layer));
                let most = on_a_quarter(layer, experts);
                assert!(most > 0.6, "{} {seed}: {most}", shape.name);
            }
        }
    }
    let mean = parts.iter().sum::<f64>() / parts.len() as f64;
    assert!((0.40..0.50).contains(&mean), "{mean}: {parts:?}");
    assert!(
        parts.iter().all(|part| (0.3..0.6).contains(part)),
        "{parts:?}"
    );
}

#[test]
fn rows_that_are_alike_begin_alike_however_pieces_are_cut() {
    let same = [1, 2, 3];
    let mut whole = [0; 24];
    begin_rows(&mut whole, 0, 8, &same);
    assert_eq!(whole, [[1, 2, 3, 0, 0, 0, 0, 0]; 3].as_flattened());
    for cut in 0..whole.len() {
        let mut pieces = [0; 24];
        let (first, second) = pieces.split_at_mut(cut);
        begin_rows(first, 0, 8, &same);
        begin_rows(second, cut, 8, &same);
        assert_eq!(pieces, whole, "cut at {cut}");
    }
}

/// The smallest file of one: the real ones' has 400 million parameters.
#[test]
fn an_encoder_of_images_is_written_as_its_files_are() {
    let shape = Shape::find_any("Gemma3-4B-mmproj").unwrap();
    assert!(
        Shape::find(shape.name).is_err(),
        "it is no model of language"
    );
    let model = Model::new(shape, DType::Q8_0).layers(1).unwrap();
    let files = ModelFiles::from_gguf(Mapping::from(model.write_to(Vec::new()).unwrap())).unwrap();
    let tensors = files.tensors();
    for (name, dtype, shape) in [
        ("v.patch_embd.weight", DType::F32, vec![1152, 3, 14, 14]),
        ("v.position_embd.weight", DType::F32, vec![4096, 1152]),
        ("v.blk.0.attn_q.weight", DType::Q8_0, vec![1152, 1152]),
        ("v.blk.0.ffn_up.weight", DType::Q8_0, vec![4304, 1152]),
        // Rows of 4,304 are no whole blocks.
        ("v.blk.0.ffn_down.weight", DType::F16, vec![1152, 4304]),
        ("mm.input_projection.weight", DType::F16, vec![1152, 2560]),
    ] {
        let tensor = tensors.require_shape(name, &shape).unwrap();
        assert_eq!(tensor.dtype(), dtype, "{name}");
    }
    let encoder = crate::ImageEncoder::load(files).unwrap().unwrap();
    let grid = encoder.shape().grid([896, 896]);
    assert_eq!(encoder.shape().tokens(grid).count(), 256);
    let products = encoder.products(grid);
    let layer = 4096 * (4 * 1152 * 1152 + 1152 * 4304);
    assert_eq!(products.quantized, layer);
    let float = 4096 * (1152 * 4304 + 1152 * 588) + 256 * 1152 * 2560;
    assert_eq!(products.float, float);
    assert_eq!(products.attention, 2 * 1152 * 4096 * 4096);
}
