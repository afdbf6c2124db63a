//! What passes compute, bit for bit, since `NUMERICS_VERSION` was raised last.
//!
//! KV that outlives a process is gone on with by the next one of the same version, so a change of any bit that is not
//! told by the version would mix two arithmetics in one conversation. The portable level stands for all: kernels are
//! written once, over operations that `simd/tests.rs` compares.

mod runner;

use lacuna_kernels::{Cpu, CpuConfig, ElementType, Level};
use lacuna_kv::{KvPolicy, Layer, Sequence, Side};
use lacuna_models::NUMERICS_VERSION;
use ring::digest::{Context, SHA256};
use runner::Runner;

/// The version that the digests are of.
const VERSION: u32 = 4;

/// Models and the start of a digest of their KV and logits: rows and quantized weights, windows, latent rows,
/// experts, states alone and beside rows; rows of fewer bits.
const DIGESTS: [(&str, ElementType, &str); 13] = [
    ("qwen3/model.gguf", ElementType::F16, "00303bfb0826ad85"),
    (
        "qwen3-types/Q4_K_M.gguf",
        ElementType::F16,
        "0cdc63f1f9357d18",
    ),
    (
        "qwen3-types/dynamic-IQ2_XXS.gguf",
        ElementType::F16,
        "b377a28000df7774",
    ),
    (
        "families/gemma3/model.gguf",
        ElementType::F16,
        "fd52ba56c651209b",
    ),
    (
        "families/gpt-oss/model.gguf",
        ElementType::F16,
        "9f73d1367969bf73",
    ),
    (
        "families/deepseek-v2-lite/model.gguf",
        ElementType::F16,
        "7f3ec8ac9e0286b2",
    ),
    (
        "families/qwen3.5/model.gguf",
        ElementType::F16,
        "c5700ebd69e0c366",
    ),
    (
        "families/falcon-h1/model.gguf",
        ElementType::F16,
        "1bdd17ff58e2fbc1",
    ),
    (
        "families/nemotron-h-moe/model.gguf",
        ElementType::F16,
        "009dbe5390666198",
    ),
    (
        "families/lfm2/model.gguf",
        ElementType::F16,
        "dd8a60bd29649b34",
    ),
    (DEMO, ElementType::Q8_0, "1a3bbff883059b06"),
    (DEMO, ElementType::Q4_0, "2942cfb09eda2050"),
    (DEMO, ElementType::Iq4Nl, "7c19731b9471794d"),
];

/// Whose heads are whole blocks.
const DEMO: &str = "../models/demo/lacuna-demo-q8_0.gguf";

fn hash_rows(hash: &mut Context, sequence: &Sequence) {
    for (layer, rows) in sequence.geometry().clone().own_rows() {
        for side in Side::BOTH {
            let view = sequence.view(Layer(layer.0), side);
            for row in view.rows() {
                (0..rows.kv_heads).for_each(|head| hash.update(view.head(row, head)));
            }
        }
    }
}

/// A prompt in one pass, and a few tokens behind it, which see its rows and states.
fn digest(path: &str, element: ElementType) -> String {
    let mut runner = Runner::with(path, KvPolicy::default(), element, 1);
    runner.cpu = Cpu::new(CpuConfig {
        level: Some(Level::Portable),
        ..CpuConfig::default()
    })
    .expect("every processor has it");
    // Of the smallest vocabulary.
    let tokens: Vec<u32> = (0..48).map(|index| 4 + index * 7 % 11).collect();
    let mut sequence = runner.sequence();
    let mut hash = Context::new(&SHA256);
    for tokens in [&tokens[..40], &tokens[40..]] {
        let logits = runner.extend(&mut sequence, tokens);
        for logit in logits {
            hash.update(&logit.to_le_bytes());
        }
        hash_rows(&mut hash, &sequence);
    }
    let digest = hash.finish();
    digest.as_ref()[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

// The system's sine decides a bit of a rotation now and then.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn what_passes_compute_changes_with_the_version_of_numerics_alone() {
    let found = DIGESTS.map(|(path, element, _)| (path, element, digest(path, element)));
    let expected = DIGESTS.map(|(path, element, digest)| (path, element, digest.to_owned()));
    match VERSION == NUMERICS_VERSION {
        true => assert!(
            found == expected,
            "passes compute other bits than before: raise NUMERICS_VERSION in lacuna-models/src/lib.rs, and put the \
             version and these digests here: {found:#?}"
        ),
        false => panic!(
            "NUMERICS_VERSION is {NUMERICS_VERSION}; put it and these digests here: {found:#?}"
        ),
    }
}
