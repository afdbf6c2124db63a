//! On one device the same rows give the same bits, however a pass came to them.

use std::num::NonZeroUsize;

use lacuna_gpu::VulkanConfig;
use lacuna_kernels::ElementType;
use lacuna_kv::{KvPolicy, Layout};
use lacuna_models::{Likeliest, LogitRows, TokenLogit};
use lacuna_pages::ByteLength;

use crate::support::{OnDevice, config, expected, some_tokens};

fn demo() -> OnDevice {
    OnDevice::open("demo", ElementType::F16)
}

/// What `tokens` give in passes of `chunk` tokens.
fn in_chunks(model: &mut OnDevice, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let mut sequence = model.sequence();
    let chunks = tokens.chunks(chunk);
    chunks
        .flat_map(|chunk| model.extend(&mut sequence, chunk))
        .collect()
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn one_pass_equals_chunks_and_token_by_token() {
    let mut model = demo();
    // Rows in four partitions.
    let tokens = some_tokens(210, model.vocabulary());
    let whole = model.logits(&tokens);
    for chunk in [3, 64, 130] {
        assert!(
            in_chunks(&mut model, &tokens, chunk) == whole,
            "chunks of {chunk}"
        );
    }
    let start = &tokens[..100];
    let one_by_one = in_chunks(&mut model, start, 1);
    assert!(one_by_one == whole[..one_by_one.len()], "token by token");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn one_pass_equals_chunks_with_other_weights_and_windows() {
    for (path, element) in [
        ("qwen3/model.gguf", ElementType::F32),
        ("llama3/model.gguf", ElementType::F16),
        ("qwen2/model.gguf", ElementType::Bf16),
        ("qwen3-types/Q8_0.gguf", ElementType::F16),
        ("qwen3-types/Q4_0.gguf", ElementType::F16),
        ("qwen3-types/Q4_1.gguf", ElementType::F16),
        ("qwen3-types/Q5_0.gguf", ElementType::F16),
        ("qwen3-types/Q5_1.gguf", ElementType::F16),
        ("qwen3-types/Q4_K_M.gguf", ElementType::F16),
        ("qwen3-types/dynamic-tables.gguf", ElementType::F16),
        ("families/mistral-window/hf", ElementType::F16),
    ] {
        let mut model = OnDevice::open(path, element);
        let tokens = some_tokens(40, model.vocabulary().min(16));
        let whole = model.logits(&tokens);
        for chunk in [1, 3, 16] {
            let pieces = in_chunks(&mut model, &tokens, chunk);
            assert!(pieces == whole, "{path} in chunks of {chunk}");
        }
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_batch_of_sequences_equals_each_alone() {
    let mut model = demo();
    let prompts = [150, 1, 17, 2, 5].map(|count| some_tokens(count, 250 + count));
    let alone: Vec<f32> = prompts
        .iter()
        .flat_map(|prompt| {
            let logits = model.logits(prompt);
            logits[logits.len() - model.vocabulary()..].to_vec()
        })
        .collect();
    let mut sequences = [(); 5].map(|()| model.sequence());
    let mut all: Vec<_> = sequences
        .iter_mut()
        .zip(&prompts)
        .map(|(sequence, prompt)| (sequence, &prompt[..]))
        .collect();
    let together = model.pass(&mut all, LogitRows::Last);
    assert!(together == alone);
    // And a token of each, as they are decoded.
    for (sequence, prompt) in sequences.iter_mut().zip(&prompts) {
        sequence.accept(prompt.len());
    }
    let next = [9u32];
    let mut all: Vec<_> = sequences.iter_mut().map(|it| (it, &next[..])).collect();
    let together = model.pass(&mut all, LogitRows::Last);
    let alone: Vec<f32> = prompts
        .iter()
        .flat_map(|prompt| {
            let mut sequence = model.sequence();
            model.extend(&mut sequence, prompt);
            model.extend(&mut sequence, &next)
        })
        .collect();
    assert!(together == alone);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn forked_shared_and_truncated_equal_fresh() {
    let mut model = demo();
    let tokens = some_tokens(300, model.vocabulary());
    let (prefix, others) = (&tokens[..261], [11u32, 12, 13, 14]);
    let mut fresh = |count: usize| {
        let mut sequence = model.sequence();
        model.extend(&mut sequence, &prefix[..count]);
        model.extend(&mut sequence, &others)
    };
    let (after_all, after_some) = (fresh(261), fresh(100));

    let mut first = model.sequence();
    model.extend(&mut first, prefix);
    let mut forked = first.fork().expect("pages are shared");
    let mut shared = first.share_prefix(100).expect("pages are shared");
    assert!(
        first.report().shared_bytes > 0,
        "whole pages are shared, not copied"
    );
    assert!(model.extend(&mut forked, &others) == after_all, "forked");
    assert!(model.extend(&mut shared, &others) == after_some, "shared");
    // What others wrote behind the prefix is not here.
    let mut again = first.fork().expect("pages are shared");
    drop((forked, shared));
    assert!(
        model.extend(&mut first, &others) == after_all,
        "the one forked from"
    );
    assert!(
        model.extend(&mut again, &others) == after_all,
        "forked again"
    );
    first.truncate(100).expect("pages go back");
    assert!(model.extend(&mut first, &others) == after_some, "truncated");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn short_windows_equal_whole_buffers() {
    let tokens = some_tokens(280, 250);
    let whole = demo().logits(&tokens);
    let config = VulkanConfig {
        // A partition of rows, and a few dozen rows of a matrix.
        window: Some(ByteLength::kibibytes(160)),
        ..config()
    };
    let policy = KvPolicy::default();
    let parts = OnDevice::with("demo", ElementType::F16, policy, config);
    let mut parts = parts.expect("the device runs the demo");
    assert!(parts.logits(&tokens) == whole);
    // And steps are as the ones before them but where a window or a partition ends.
    let mut sequence = parts.sequence();
    parts.extend(&mut sequence, &tokens[..200]);
    let mut recorded = 0;
    for (number, token) in (200..).zip(tokens[200..].chunks(1)) {
        let before = parts.executor.counters().recorded_dispatches;
        let row = parts.extend(&mut sequence, token);
        assert!(row == whole[number * row.len()..][..row.len()], "{number}");
        recorded += usize::from(parts.executor.counters().recorded_dispatches > before);
    }
    assert!(recorded <= 8, "{recorded} of 80");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn products_of_bytes_by_one_instruction_equal_others() {
    for name in [
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q4_K_M",
        "dynamic-tables",
    ] {
        let path = format!("qwen3-types/{name}.gguf");
        let logits = |integer_dot| {
            let config = VulkanConfig {
                integer_dot: Some(integer_dot),
                ..config()
            };
            let policy = KvPolicy::default();
            let model = OnDevice::with(&path, ElementType::F16, policy, config);
            let mut model = model.expect("the device runs it");
            [3, 40].map(|count| model.logits(&some_tokens(count, 16)))
        };
        assert!(logits(true) == logits(false), "{path}");
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn partitions_that_are_merged_as_they_are_computed_equal_others() {
    for path in [
        "demo",
        "families/gemma2/hf",
        "families/gpt-oss/hf",
        "families/mistral-window/hf",
    ] {
        let logits = |merge_partitions| {
            let config = VulkanConfig {
                merge_partitions: Some(merge_partitions),
                ..config()
            };
            let policy = KvPolicy::default();
            let model = OnDevice::with(path, ElementType::F16, policy, config);
            let mut model = model.expect("the device runs it");
            let tokens = some_tokens(200, model.vocabulary().min(16));
            // In chunks of which each begins in the middle of a partition.
            (model.logits(&tokens), in_chunks(&mut model, &tokens, 90))
        };
        let (whole, chunks) = logits(true);
        assert!(whole == chunks, "{path} in chunks");
        assert!((whole, chunks) == logits(false), "{path}");
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn interleaved_layers_equal_buffers_of_their_own() {
    let tokens = expected("llama3").tokens;
    let logits = |policy| {
        let config = config();
        let model = OnDevice::with("llama3/hf", ElementType::F16, policy, config);
        model.expect("the device runs it").logits(&tokens)
    };
    let layers = |count| {
        let count = NonZeroUsize::new(count).expect("not zero");
        logits(KvPolicy::Sparse(Layout::Interleaved(count)))
    };
    let alone = layers(1);
    assert!(alone == layers(2));
    assert!(alone == logits(KvPolicy::default()));
}

/// A few tokens of each row are read back with their logits, in one order whatever the rows of a pass.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn the_likeliest_of_several_tokens_are_those_of_the_logits() {
    let mut model = demo();
    let vocabulary = model.vocabulary();
    let tokens = some_tokens(70, vocabulary);
    let logits = model.logits(&tokens);
    for count in [1, 40, 256] {
        let sorted = logits.chunks_exact(vocabulary).flat_map(|row| {
            let row = (0..).zip(row);
            let mut row: Vec<TokenLogit> = row
                .map(|(token, &logit)| TokenLogit { token, logit })
                .collect();
            row.sort_by(|a, b| b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token)));
            row.truncate(count);
            row
        });
        let wanted: Vec<TokenLogit> = sorted.collect();
        for chunk in [1, 9, 70] {
            let (mut sequence, before) =
                (model.sequence(), model.executor.counters().read_back_bytes);
            let chunks = tokens.chunks(chunk);
            let found = chunks.flat_map(|chunk| model.top_k(&mut sequence, chunk, count));
            assert!(found.eq(wanted.iter().copied()), "{count}, {chunk} at once");
            let read = model.executor.counters().read_back_bytes - before;
            assert_eq!(read, 8 * 70 * count as u64);
        }
    }
}

/// One word of each row is read back, where logits are a row of the vocabulary each.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn likeliest_tokens_are_those_of_the_logits_and_four_bytes_each() {
    let mut model = demo();
    let vocabulary = model.vocabulary();
    let tokens = some_tokens(70, vocabulary);
    let logits = model.logits(&tokens);
    let row_bytes = 4 * vocabulary as u64;
    assert_eq!(model.executor.counters().read_back_bytes, 70 * row_bytes);
    let first_of_largest = |row: &[f32]| {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let at = row.iter().position(|&logit| logit == most);
        Likeliest::Token(at.expect("a number") as u32)
    };
    let wanted = logits.chunks_exact(vocabulary).map(first_of_largest);
    let wanted: Vec<Likeliest> = wanted.collect();
    for chunk in [1, 9, 70] {
        let (mut sequence, before) = (model.sequence(), model.executor.counters().read_back_bytes);
        let chunks = tokens.chunks(chunk);
        let found = chunks.flat_map(|chunk| model.likeliest(&mut sequence, chunk));
        assert_eq!(found.collect::<Vec<_>>(), wanted, "{chunk} at once");
        assert_eq!(model.executor.counters().read_back_bytes - before, 4 * 70);
    }
}
