//! Every family against `transformers`, on tiny random models whose windows bite and whose rotations
//! are stretched; and that what is computed does not depend on how a prompt is cut.
//!
//! `reference/README.md` says what the fixtures are and how they were made.

mod runner;

use std::fs;
use std::path::Path;

use lacuna_files::{Mapping, ModelFiles};
use lacuna_kernels::ElementType;
use lacuna_kv::{KvPolicy, Layer, Sequence};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::{BatchLimits, LogitRows, Model, Segment};
use runner::{Expected, Runner, TOKENS, expected, families, floats, folder, relative_error};

/// Float32 arithmetic against float64.
const BOUND: f32 = 1e-4;

/// The folder of a fixture with another description.
fn with_config(fixture: &Path, config: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a scratch folder");
    for file in ["model.safetensors", "tokenizer.json"] {
        fs::copy(fixture.join("hf").join(file), copy.path().join(file)).expect("room to copy");
    }
    fs::copy(config, copy.path().join("config.json")).expect("room to copy");
    copy
}

/// The models of a fixture, each with a name for messages: its GGUF file, as newer and older converters
/// write it, and its folder by each spelling of its description.
fn models(name: &str) -> Vec<(String, Model)> {
    let fixture = folder().join("families").join(name);
    let open = |path: &Path, what: String| {
        let files = ModelFiles::open(path).unwrap_or_else(|error| panic!("{what}: {error}"));
        let model = Model::load(files).unwrap_or_else(|error| panic!("{what}: {error}"));
        (what, model)
    };
    let mut models = Vec::new();
    for (file, what) in [("model.gguf", "GGUF"), ("model-older.gguf", "older GGUF")] {
        let gguf = fixture.join(file);
        if gguf.exists() {
            models.push(open(&gguf, format!("{name} {what}")));
        }
    }
    let folder = fixture.join("hf");
    if folder.exists() {
        models.push(open(&folder, format!("{name} folder")));
    }
    let older = fixture.join("hf-old-spelling/config.json");
    if older.exists() {
        let copy = with_config(&fixture, &older);
        models.push(open(copy.path(), format!("{name} older spelling")));
    }
    models
}

fn runner(model: Model, expected: &Expected) -> Runner {
    let context = expected.context.unwrap_or(TOKENS);
    Runner::of(model, KvPolicy::default(), ElementType::F32, 1, context)
}

#[test]
fn every_family_matches_the_reference_from_files_of_both_kinds() {
    let mut wrong = Vec::new();
    for name in families() {
        let path = format!("families/{name}");
        let (expected, reference) = (expected(&path), floats(&format!("{path}/logits.f32")));
        for (what, model) in models(&name) {
            let found = runner(model, &expected).logits(&expected.tokens);
            let error = relative_error(&expected.rows_of(&found), &reference);
            println!("{what}: relative error {error:.2e}");
            if error.is_nan() || error > BOUND {
                wrong.push(format!("{what}: {error:.2e}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn greedy_continuations_of_every_family_match_the_reference() {
    for name in families() {
        let expected = expected(&format!("families/{name}"));
        let Some(greedy) = &expected.greedy else {
            continue;
        };
        for (what, model) in models(&name) {
            let mut runner = runner(model, &expected);
            let found = runner.greedy(&greedy.prompt, greedy.tokens.len());
            assert_eq!(found, greedy.tokens, "{what}");
        }
    }
}

#[test]
fn no_family_depends_on_how_a_prompt_is_cut() {
    for name in families() {
        let expected = expected(&format!("families/{name}"));
        for (what, model) in models(&name).into_iter().take(1) {
            let mut runner = runner(model, &expected);
            let whole = runner.logits(&expected.tokens);
            for chunk in [1, 3, 16] {
                let mut sequence = runner.sequence();
                let pieces: Vec<f32> = expected
                    .tokens
                    .chunks(chunk)
                    .flat_map(|chunk| runner.extend(&mut sequence, chunk))
                    .collect();
                assert!(pieces == whole, "{what} in chunks of {chunk}");
            }
        }
    }
}

#[test]
fn experts_in_one_tensor_of_another_rank_or_size_are_refused_by_name() {
    let fixture = folder().join("families/qwen3-moe");
    let copy = with_config(&fixture, &fixture.join("hf/config.json"));
    let path = copy.path().join("model.safetensors");
    let file = fs::read(&path).expect("a copy");
    for part in ["gate_proj", "down_proj", "gate_up_proj"] {
        let name = format!("model.layers.1.mlp.experts.{part}");
        fs::write(&path, with_tensor(&file, &name, [96, 16])).expect("room for it");
        let loaded = Model::load(ModelFiles::open(copy.path()).expect("files"));
        let shown = loaded.map(|_| ()).expect_err("no such experts").to_string();
        assert!(
            shown.contains(&name) && shown.contains("[96, 16]"),
            "{shown}"
        );
    }
}

#[test]
fn a_token_reads_its_experts_and_the_rest_from_files_of_both_kinds() {
    const FLOAT: u64 = 4;
    let (hidden, vocabulary, heads, kv_heads, head_dim) = (16, 64, 4, 2, 8);
    let (inner, experts, used) = (12, 8, 3);
    let attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim;
    let norms = 2 * hidden + 2 * head_dim;
    let layer = attention + norms + experts * hidden + 3 * used * inner * hidden;
    // One row of the embedding table; the output matrix is a tensor of its own.
    let elements = 2 * layer + hidden + hidden + vocabulary * hidden;
    for (what, model) in models("qwen3-moe") {
        assert_eq!(model.active_weight_bytes(), FLOAT * elements, "{what}");
        let (layers, logits) = model.program().products();
        let vectors = 2 * norms + hidden + hidden;
        assert_eq!(layers + logits, elements - vectors, "{what}");
    }
}

#[test]
fn a_token_reads_all_of_a_dense_model_but_rows_of_tables() {
    for (name, tied) in [("olmo2", false), ("granite", true)] {
        for (what, model) in models(name) {
            let spec = model.spec();
            let table = (spec.vocabulary * spec.hidden * 4) as u64;
            let unread = match tied {
                true => 0,
                false => table - (spec.hidden * 4) as u64,
            };
            let read = model.weight_bytes() - unread;
            assert_eq!(model.active_weight_bytes(), read, "{what}");
        }
    }
}

#[test]
fn what_makes_keys_of_latent_rows_is_turned_round_where_files_have_it_with_what_makes_values() {
    let layer = 4 * 20 * 8 * 4;
    for name in ["deepseek-v2-lite", "deepseek-v3"] {
        for (what, model) in models(name) {
            let weights = model.weight_plan().clone();
            let apart = what.ends_with(" GGUF") && !what.contains("older");
            let expected = if apart { 0 } else { 3 * layer };
            assert_eq!(weights.derived_bytes(), expected, "{what}");
            assert!(weights.derived.iter().all(|made| made.shape == [4, 20, 8]));
        }
    }
}

#[test]
fn halves_of_latent_attention_that_are_missing_or_of_another_shape_are_refused_by_name() {
    let fixture = folder().join("families/deepseek-v2-lite");
    let gguf = |from: &str, to: &str| {
        let mut bytes = fs::read(fixture.join("model.gguf")).expect("a committed fixture");
        let places = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(from.as_bytes()));
        for at in places.collect::<Vec<_>>() {
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        }
        let files = ModelFiles::from_gguf(Mapping::from(bytes)).expect("a GGUF file");
        Model::load(files)
            .map(|_| ())
            .expect_err("not whole")
            .to_string()
    };
    for part in ["attn_k_b", "attn_v_b", "attn_kv_a_norm", "attn_kv_a_mqa"] {
        let shown = gguf(part, &part.replace("attn", "attx"));
        assert!(shown.contains(&format!("blk.0.{part}")), "{shown}");
    }
    let config = fs::read_to_string(fixture.join("hf/config.json")).expect("a committed fixture");
    for (field, tensor) in [
        (("\"v_head_dim\": 10", "\"v_head_dim\": 9"), "kv_b_proj"),
        (
            ("\"qk_nope_head_dim\": 8", "\"qk_nope_head_dim\": 6"),
            "q_proj",
        ),
        (
            ("\"kv_lora_rank\": 20", "\"kv_lora_rank\": 16"),
            "kv_a_proj",
        ),
    ] {
        let changed = config.replace(field.0, field.1);
        assert_ne!(changed, config, "{field:?}");
        let other = tempfile::NamedTempFile::new().expect("a scratch file");
        fs::write(other.path(), changed).expect("room for it");
        let copy = with_config(&fixture, other.path());
        let loaded = Model::load(ModelFiles::open(copy.path()).expect("files"));
        let shown = loaded.map(|_| ()).expect_err("another shape").to_string();
        assert!(shown.contains(tensor), "{shown}");
    }
}

/// The last row of logits after the tokens of each sequence, all computed in one pass.
fn pass(runner: &mut Runner, sequences: &mut [Sequence], tokens: &[&[u32]]) -> Vec<f32> {
    let segments = sequences.iter_mut().zip(tokens).map(|(sequence, tokens)| {
        sequence.prepare(tokens.len()).expect("room");
        Segment {
            tokens,
            sequence,
            logits: LogitRows::Last,
            images: &[],
        }
    });
    let mut segments: Vec<Segment<'_>> = segments.collect();
    let logits = runner
        .model
        .forward(&runner.cpu, &mut segments, &mut runner.scratch);
    let logits = logits.expect("valid tokens").to_vec();
    for (sequence, tokens) in sequences.iter_mut().zip(tokens) {
        sequence.accept(tokens.len());
    }
    logits
}

/// The same of new sequences.
fn together(runner: &mut Runner, prompts: &[&[u32]]) -> Vec<f32> {
    let mut sequences: Vec<Sequence> = prompts.iter().map(|_| runner.sequence()).collect();
    pass(runner, &mut sequences, prompts)
}

#[test]
fn no_family_depends_on_threads_or_on_what_else_is_in_the_batch() {
    for name in families() {
        let expected = expected(&format!("families/{name}"));
        let tokens = &expected.tokens;
        let prompts = [&tokens[..11], &tokens[5..6], &tokens[..1], &tokens[3..22]];
        let context = expected.context.unwrap_or(TOKENS);
        let mut runners = [1, 3].map(|threads| {
            let (_, model) = models(&name).swap_remove(0);
            Runner::of(
                model,
                KvPolicy::default(),
                ElementType::F32,
                threads,
                context,
            )
        });
        let alone: Vec<f32> = prompts
            .iter()
            .flat_map(|prompt| together(&mut runners[0], &[prompt]))
            .collect();
        for runner in &mut runners {
            assert!(together(runner, &prompts) == alone, "{name}");
        }
    }
}

/// Passes whose last tokens turn out not to follow, of some sequences more and of some none: what is left is what each is
/// without them, bit for bit.
#[test]
fn every_family_goes_back_to_the_first_tokens_of_a_pass() {
    /// Tokens of each sequence that are right, and those after them that are not.
    const STEPS: [(usize, usize); 5] = [(1, 3), (4, 0), (2, 1), (1, 0), (3, 4)];
    let mut with_states = 0;
    for name in families() {
        let expected = expected(&format!("families/{name}"));
        let token = |index: usize| expected.tokens[index % expected.tokens.len()];
        for threads in [1, 3] {
            let (what, model) = models(&name).swap_remove(0);
            let policy = KvPolicy::default();
            let mut runner = Runner::of(model, policy, ElementType::F32, threads, 64);
            let mut sequences: Vec<Sequence> = STEPS.map(|_| runner.sequence()).into();
            for (index, sequence) in sequences.iter_mut().enumerate() {
                let prompt: Vec<u32> = (0..=index).map(token).collect();
                runner.extend(sequence, &prompt);
            }
            // Some of them are shared with others.
            let mut alone: Vec<Sequence> = sequences
                .iter_mut()
                .map(|it| it.fork().expect("room"))
                .collect();
            with_states += usize::from(alone[0].geometry().has_states());
            for round in 0..3 {
                let tokens = |index: usize| {
                    let (right, wrong) = STEPS[(index + round) % STEPS.len()];
                    let all = (0..right + wrong).map(|at| token(7 * index + 5 * round + at));
                    (right, all.collect::<Vec<u32>>())
                };
                let steps: Vec<(usize, Vec<u32>)> = (0..STEPS.len()).map(tokens).collect();
                let found = guessed(&mut runner, &mut sequences, &steps);
                for ((sequence, (right, tokens)), found) in alone.iter_mut().zip(&steps).zip(found)
                {
                    let expected = runner.extend(sequence, &tokens[..*right]);
                    assert!(
                        found == expected,
                        "{what}, {threads} threads, round {round}"
                    );
                }
            }
            let last = [token(3)];
            let last = STEPS.map(|_| &last[..]);
            let together = pass(&mut runner, &mut sequences, &last);
            assert!(together == pass(&mut runner, &mut alone, &last), "{what}");
        }
    }
    assert!(with_states >= 2 * 8, "{with_states} keep states");
}

/// The logits after the right ones, which come first, of the tokens of each sequence, all computed in one pass that then goes
/// back to those.
fn guessed(
    runner: &mut Runner,
    sequences: &mut [Sequence],
    steps: &[(usize, Vec<u32>)],
) -> Vec<Vec<f32>> {
    for (sequence, (right, tokens)) in sequences.iter_mut().zip(steps) {
        let prepared = match tokens.len() - right {
            0 => sequence.prepare(*right),
            _ => sequence.prepare_to_rewind(tokens.len()),
        };
        prepared.expect("room");
    }
    let mut all: Vec<Segment<'_>> = (sequences.iter_mut().zip(steps))
        .map(|(sequence, (_, tokens))| segment(sequence, tokens, LogitRows::All))
        .collect();
    let (model, cpu, scratch) = (&runner.model, &runner.cpu, &mut runner.scratch);
    let logits = model.forward(cpu, &mut all, scratch).expect("valid tokens");
    let mut rest = logits;
    let vocabulary = model.spec().vocabulary;
    let mut found = Vec::new();
    for (right, tokens) in steps {
        let (rows, others) = rest.split_at(tokens.len() * vocabulary);
        found.push(rows[..right * vocabulary].to_vec());
        rest = others;
    }
    let mut wrong: Vec<Segment<'_>> = (sequences.iter_mut().zip(steps))
        .filter(|(_, (right, tokens))| *right < tokens.len())
        .map(|(sequence, (right, tokens))| segment(sequence, &tokens[..*right], LogitRows::None))
        .collect();
    model.rewind(cpu, &mut wrong, scratch).expect("some tokens");
    for (sequence, (right, _)) in sequences.iter_mut().zip(steps) {
        sequence.accept(*right);
    }
    found
}

fn segment<'a>(sequence: &'a mut Sequence, tokens: &'a [u32], logits: LogitRows) -> Segment<'a> {
    Segment {
        tokens,
        sequence,
        logits,
        images: &[],
    }
}

#[test]
fn forks_of_every_family_go_on_together_as_each_does_alone() {
    /// Long enough that its first rows are read once for all forks.
    const PROMPT: usize = 600;
    /// Tokens by which forks differ: most begin alike, one at another place, and not all have gone as far.
    const OWN: [usize; 6] = [1, 3, 2, 270, 5, 1];
    let mut shares = 0;
    for name in families() {
        let expected = expected(&format!("families/{name}"));
        if expected
            .context
            .is_some_and(|context| context < PROMPT + 300)
        {
            continue;
        }
        let vocabulary = expected.vocab as u32;
        let token = |index: usize| expected.tokens[index % expected.tokens.len()];
        for threads in [1, 3] {
            let (what, model) = models(&name).swap_remove(0);
            let policy = KvPolicy::default();
            let mut runner = Runner::of(model, policy, ElementType::F32, threads, PROMPT + 300);
            let prompt: Vec<u32> = (0..PROMPT).map(token).collect();
            let mut source = runner.sequence();
            for part in prompt.chunks(TOKENS) {
                runner.extend(&mut source, part);
            }
            let mut forks: Vec<Sequence> = Vec::new();
            for (fork, count) in OWN.into_iter().enumerate() {
                let mut sequence = source.fork().expect("room");
                let own: Vec<u32> = (0..count)
                    .map(|at| (token(at + 7 * fork) + fork as u32) % vocabulary)
                    .collect();
                for part in own.chunks(TOKENS) {
                    runner.extend(&mut sequence, part);
                }
                forks.push(sequence);
            }
            let mut alone: Vec<Sequence> = forks
                .iter_mut()
                .map(|it| it.fork().expect("room"))
                .collect();
            let layers = (0..forks[0].geometry().layers().len()).map(Layer);
            let mut layers = layers.filter(|&layer| forks[0].geometry().rows(layer).is_some());
            shares +=
                usize::from(layers.any(|layer| forks[0].rows_in_common(&forks[1], layer) >= 512));
            for round in 0..3 {
                let tokens: Vec<u32> = (0..OWN.len())
                    .map(|fork| token(11 * fork + round))
                    .collect();
                let tokens: Vec<&[u32]> = tokens.chunks(1).collect();
                let together = pass(&mut runner, &mut forks, &tokens);
                let alone = alone.chunks_mut(1).zip(tokens.chunks(1));
                let one_by_one: Vec<f32> = alone
                    .flat_map(|(sequence, token)| pass(&mut runner, sequence, token))
                    .collect();
                assert!(
                    together == one_by_one,
                    "{what}, {threads} threads, round {round}"
                );
            }
        }
    }
    assert!(shares >= 20, "forks of {shares} share rows");
}

#[test]
fn a_fork_of_every_family_goes_on_as_its_source_does() {
    for name in families() {
        let expected = expected(&format!("families/{name}"));
        let (what, model) = models(&name).swap_remove(0);
        let mut runner = runner(model, &expected);
        let (start, rest) = expected.tokens[..20].split_at(13);
        let mut source = runner.sequence();
        runner.extend(&mut source, start);
        let mut fork = source.fork().expect("room");
        let forked = runner.extend(&mut fork, rest);
        assert!(forked == runner.extend(&mut source, rest), "{what}");
    }
}

#[test]
fn slots_of_every_family_lie_close_and_apart() {
    let limits = BatchLimits {
        tokens: 512,
        logit_rows: 1,
        context_tokens: 512,
    };
    for name in families() {
        for (what, model) in models(&name).into_iter().take(1) {
            let plan = ArenaPlan::new(model.program(), limits).expect("a small model");
            assert_eq!(plan.verify(model.program()), Ok(()), "{what}");
            let (bytes, least) = (plan.bytes(), plan.live_bytes());
            println!("{what}: {bytes} bytes, at least {least}");
            assert!(bytes <= least + least / 20, "{what}: {bytes} of {least}");
        }
    }
}

/// The tensors of a file in the safetensors format, and one more of zeros.
fn with_tensor(file: &[u8], name: &str, shape: [usize; 2]) -> Vec<u8> {
    let (length, rest) = file.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes")) as usize;
    let (header, data) = rest.split_at(length);
    let mut header: serde_json::Value = serde_json::from_slice(header).expect("a header");
    let end = data.len() + 4 * shape[0] * shape[1];
    header[name] = serde_json::json!({
        "dtype": "F32", "shape": shape, "data_offsets": [data.len(), end],
    });
    let header = header.to_string();
    let mut more = (header.len() as u64).to_le_bytes().to_vec();
    more.extend(header.as_bytes());
    more.extend(data);
    more.resize(8 + header.len() + end, 0);
    more
}

#[test]
fn keys_and_values_that_a_sharing_layer_does_not_use_are_left_alone_and_others_refused() {
    let fixture = folder().join("families/gemma3n");
    let copy = with_config(&fixture, &fixture.join("hf/config.json"));
    let path = copy.path().join("model.safetensors");
    let file = fs::read(&path).expect("a copy");
    let load = |name: &str| {
        fs::write(&path, with_tensor(&file, name, [16, 8])).expect("room for it");
        Model::load(ModelFiles::open(copy.path()).expect("files")).map(|_| ())
    };
    for part in ["k_proj", "v_proj"] {
        load(&format!("model.layers.5.self_attn.{part}.weight")).expect("it shares layer 3's");
    }
    let surplus = load("model.layers.5.self_attn.r_proj.weight").expect_err("unknown");
    assert!(surplus.to_string().contains("r_proj"), "{surplus}");
}

/// Cohere's folders have some beside norms that add nothing.
#[test]
fn biases_of_norms_that_have_none_are_left_alone_if_they_are_zeros_and_others_refused() {
    let fixture = folder().join("families/cohere2-moe");
    let copy = with_config(&fixture, &fixture.join("hf/config.json"));
    let path = copy.path().join("model.safetensors");
    let file = fs::read(&path).expect("a copy");
    let name = "model.layers.1.input_layernorm.bias";
    let mut more = with_tensor(&file, name, [1, 16]);
    fs::write(&path, &more).expect("room for it");
    let load = || Model::load(ModelFiles::open(copy.path()).expect("files")).map(|_| ());
    load().expect("nothing is added");
    *more.last_mut().expect("numbers") = 0x3F;
    fs::write(&path, &more).expect("room for it");
    let surplus = load().expect_err("something is");
    assert!(surplus.to_string().contains(name), "{surplus}");
}

/// A folder's copy with a tensor's first number changed.
fn with_number(fixture: &Path, tensor: &str, number: f32) -> tempfile::TempDir {
    let copy = with_config(fixture, &fixture.join("hf/config.json"));
    let path = copy.path().join("model.safetensors");
    let mut file = fs::read(&path).expect("a copy");
    let length = u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + length]).expect("a header");
    let start = header[tensor]["data_offsets"][0]
        .as_u64()
        .expect("such a tensor") as usize;
    file[8 + length + start..][..4].copy_from_slice(&number.to_le_bytes());
    fs::write(&path, file).expect("room for it");
    copy
}

#[test]
fn numbers_that_no_state_can_be_computed_with_are_refused_by_the_tensors_name() {
    let fixture = folder().join("families/qwen3.5");
    let load = |part: &str, number: f32| {
        let tensor = format!("model.layers.1.linear_attn.{part}");
        let copy = with_number(&fixture, &tensor, number);
        Model::load(ModelFiles::open(copy.path()).expect("files")).map(|_| ())
    };
    for (part, number) in [
        ("A_log", f32::NAN),
        ("A_log", 200.0),
        ("A_log", f32::INFINITY),
        ("dt_bias", f32::NEG_INFINITY),
        ("dt_bias", f32::NAN),
    ] {
        let refused = load(part, number).expect_err("no such state").to_string();
        assert!(
            refused.contains(&format!("linear_attn.{part}")),
            "{refused}"
        );
    }
    // A state that never forgets is one.
    load("A_log", f32::NEG_INFINITY).expect("a rate of 0");

    let bytes = fs::read(fixture.join("model.gguf")).expect("a committed fixture");
    let files = ModelFiles::from_gguf(Mapping::from(bytes.clone())).expect("a GGUF file");
    let rates = files.tensors().require("blk.1.ssm_a").expect("a state");
    let rates = rates.bytes().to_vec();
    let mut places = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(&rates));
    let at = places.next().expect("its bytes");
    let mut growing = bytes;
    growing[at + 3] &= 0x7F;
    let files = ModelFiles::from_gguf(Mapping::from(growing)).expect("a GGUF file");
    let refused = Model::load(files)
        .map(|_| ())
        .expect_err("it grows")
        .to_string();
    assert!(refused.contains("blk.1.ssm_a"), "{refused}");
}

#[test]
fn layers_that_foretell_are_left_out_and_kinds_that_tensors_contradict_are_refused() {
    let fixture = folder().join("families/qwen3.5");
    let copy = with_config(&fixture, &fixture.join("hf/config.json"));
    let path = copy.path().join("model.safetensors");
    let file = fs::read(&path).expect("a copy");
    let name = "mtp.layers.0.self_attn.q_proj.weight";
    fs::write(&path, with_tensor(&file, name, [16, 8])).expect("room for it");
    Model::load(ModelFiles::open(copy.path()).expect("files")).expect("they are not needed");

    let config = fs::read_to_string(fixture.join("hf/config.json")).expect("a committed fixture");
    let changed = config.replacen("\"linear_attention\"", "\"full_attention\"", 1);
    assert_ne!(changed, config);
    fs::write(copy.path().join("config.json"), changed).expect("room for it");
    let loaded = Model::load(ModelFiles::open(copy.path()).expect("files"));
    let refused = loaded
        .map(|_| ())
        .expect_err("no attention there")
        .to_string();
    // What makes queries, keys and values there makes those of a state.
    assert!(refused.contains("layers.0.linear_attn"), "{refused}");

    let fewer = config.replacen("\"linear_attention\",", "", 1);
    fs::write(copy.path().join("config.json"), fewer).expect("room for it");
    let loaded = Model::load(ModelFiles::open(copy.path()).expect("files"));
    let refused = loaded.map(|_| ()).expect_err("one too few").to_string();
    assert!(refused.contains("layer_types"), "{refused}");
}

/// What is said of a folder whose description has another text in the place of one.
fn refused_with(fixture: &Path, from: &str, to: &str) -> String {
    let config = fs::read_to_string(fixture).expect("a committed fixture");
    let changed = config.replacen(from, to, 1);
    assert_ne!(changed, config, "{from}");
    let other = tempfile::NamedTempFile::new().expect("a scratch file");
    fs::write(other.path(), changed).expect("room for it");
    let folder = fixture.parent().and_then(Path::parent).expect("a fixture");
    let copy = with_config(folder, other.path());
    let loaded = Model::load(ModelFiles::open(copy.path()).expect("files"));
    loaded.map(|_| ()).expect_err("refused").to_string()
}

#[test]
fn layers_of_one_thing_each_that_tensors_or_other_lists_contradict_are_refused() {
    let fixture = folder().join("families/nemotron-h/hf-old-spelling/config.json");
    for (letters, named) in [
        ("*-*M-", "layers.0.mixer"),
        ("M-*MM", "layers.4.mixer"),
        ("M--M-", "layers.2.mixer"),
        ("M-*EM", "layers.3.mixer"),
        ("M-*M", "hybrid_override_pattern has 4 entries for 5 layers"),
        ("M-*MX", "layer type `X`"),
    ] {
        let shown = refused_with(&fixture, "M-*M-", letters);
        assert!(shown.contains(named), "{letters}: {shown}");
    }
    for (field, value, named) in [
        (
            "\"n_groups\": 2",
            "\"n_groups\": 3",
            "share 3 key heads evenly",
        ),
        (
            "\"mamba_num_heads\": 4",
            "\"mamba_num_heads\": 6",
            "mixer.in_proj",
        ),
        ("\"relu2\"", "\"silu\"", "mlp_hidden_act silu"),
        ("Infinity", "-1.0", "time_step_limit"),
        ("Infinity", "\"much\"", "time_step_limit"),
    ] {
        let shown = refused_with(&fixture, field, value);
        assert!(shown.contains(named), "{value}: {shown}");
    }
    for (part, number) in [
        ("A_log", f32::INFINITY),
        ("dt_bias", f32::NAN),
        ("D", f32::NAN),
    ] {
        let tensor = format!("backbone.layers.0.mixer.{part}");
        let fixture = folder().join("families/nemotron-h");
        let copy = with_number(&fixture, &tensor, number);
        let loaded = Model::load(ModelFiles::open(copy.path()).expect("files"));
        let shown = loaded.map(|_| ()).expect_err("no state").to_string();
        assert!(shown.contains(&tensor), "{shown}");
    }
}

#[test]
fn a_gguf_file_in_which_a_layer_is_two_things_is_refused() {
    let fixture = folder().join("families/nemotron-h/model.gguf");
    let mut bytes = fs::read(fixture).expect("a committed fixture");
    // Widths of blocks: none, 24, none, none, 24.
    let widths = [0u32, 24, 0, 0, 24].map(u32::to_le_bytes);
    let widths = widths.as_flattened();
    let mut places = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(widths));
    let at = places.next().expect("the list");
    bytes[at + 8] = 24;
    let files = ModelFiles::from_gguf(Mapping::from(bytes)).expect("a GGUF file");
    let shown = Model::load(files)
        .map(|_| ())
        .expect_err("both")
        .to_string();
    assert!(
        shown.contains("layer 2: ") && shown.contains("KV heads and a feed-forward block"),
        "{shown}"
    );
}

#[test]
fn multipliers_and_sizes_of_falcon_h1_that_are_none_are_refused_by_name() {
    let fixture = folder().join("families/falcon-h1/hf/config.json");
    for (field, value, named) in [
        (
            "\"key_multiplier\": 0.625",
            "\"key_multiplier\": 0",
            "attention scale",
        ),
        (
            "\"ssm_out_multiplier\": 0.75",
            "\"ssm_out_multiplier\": -1",
            "residual scale",
        ),
        (
            "\"lm_head_multiplier\": 0.75",
            "\"lm_head_multiplier\": 1e300",
            "logit scale",
        ),
        (
            "\"mamba_d_ssm\": 64",
            "\"mamba_d_ssm\": 80",
            "mamba_d_ssm 80",
        ),
        (
            "\"attention_bias\": false",
            "\"attention_bias\": true",
            "attention_bias true",
        ),
        (
            "\"ssm_multipliers\": [",
            "\"ssm_multipliers\": [1.0,",
            "ssm_multipliers",
        ),
    ] {
        let shown = refused_with(&fixture, field, value);
        assert!(shown.contains(named), "{value}: {shown}");
    }
}

#[test]
fn what_published_models_of_a_family_do_and_nothing_here_does_is_refused_by_name() {
    for (family, field, value, named) in [
        (
            "command-r",
            "\"use_qk_norm\": false",
            "\"use_qk_norm\": true",
            "Command R+",
        ),
        (
            "stablelm",
            "\"qk_layernorm\": false",
            "\"qk_layernorm\": true",
            "StableLM 2 12B",
        ),
        (
            "phi2",
            "\"qk_layernorm\": false",
            "\"qk_layernorm\": true",
            "qk_layernorm true",
        ),
        ("arcee", "\"relu2\"", "\"silu\"", "hidden_act silu"),
        ("nemotron", "\"relu2\"", "\"silu\"", "hidden_act silu"),
        (
            "laguna",
            "\"gating\": true",
            "\"gating\": \"per-layer\"",
            "per-head",
        ),
        (
            "laguna",
            "\"moe_router_logit_softcapping\": 0.0",
            "\"moe_router_logit_softcapping\": 5.0",
            "moe_router_logit_softcapping 5",
        ),
        (
            "laguna",
            "\"moe_apply_router_weight_on_input\": false",
            "\"moe_apply_router_weight_on_input\": true",
            "moe_apply_router_weight_on_input true",
        ),
        (
            "minicpm",
            "\"scale_emb\": 2",
            "\"num_experts\": 8, \"scale_emb\": 2",
            "8 experts",
        ),
        (
            "minicpm",
            "\"dim_model_base\": 64",
            "\"dim_model_base\": -1",
            "dim_model_base",
        ),
        (
            "hunyuan",
            "\"alpha\": 50.0",
            "\"alpha\": 0.0",
            "of type \"dynamic\"",
        ),
        (
            "hunyuan",
            "\"alpha\": 50.0",
            "\"alpha\": -1.0",
            "rope theta",
        ),
        (
            "hunyuan",
            "\"model_type\"",
            "\"use_cla\": true, \"model_type\"",
            "use_cla true",
        ),
    ] {
        let fixture = folder()
            .join("families")
            .join(family)
            .join("hf/config.json");
        let shown = refused_with(&fixture, field, value);
        assert!(shown.contains(named), "{family}, {value}: {shown}");
    }
    // Layers that are not alike, of which published folders have a number each.
    let fixture = folder().join("families/hunyuan-moe/hf-old-spelling/config.json");
    let config = fs::read_to_string(&fixture).expect("a committed fixture");
    let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    config["moe_topk"] = serde_json::json!([3, 2]);
    let changed = tempfile::NamedTempFile::new().expect("a scratch file");
    fs::write(changed.path(), config.to_string()).expect("room for it");
    let copy = with_config(&folder().join("families/hunyuan-moe"), changed.path());
    let loaded = Model::load(ModelFiles::open(copy.path()).expect("files"));
    let shown = loaded.map(|_| ()).expect_err("refused").to_string();
    assert!(
        shown.contains("experts of a token of 3 in one layer and 2 in another"),
        "{shown}"
    );
}
