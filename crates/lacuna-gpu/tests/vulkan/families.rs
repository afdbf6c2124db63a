//! Every family's fixture: run, as the processor runs it, or refused by name. What documents say of the device is this.

use std::fs;

use lacuna_gpu::Vulkan;
use lacuna_kernels::ElementType;
use lacuna_kv::{KvElements, KvPolicy};
use lacuna_models::LogitRows;

use crate::support::{
    OnDevice, OnProcessor, bound, expected, open_device, reference, relative_l2, some_tokens,
};

/// Fixtures that are refused, and what for.
const REFUSED: [(&str, &str); 0] = [];

/// All that there are fixtures of.
fn families() -> Vec<String> {
    let folder = fs::read_dir(reference().join("families")).expect("committed fixtures");
    let names = folder.map(|entry| entry.expect("readable").file_name());
    let mut names: Vec<String> = names
        .map(|name| name.into_string().expect("UTF-8"))
        .collect();
    names.sort();
    names
}

/// Paths of a family's fixture, in the forms that it has.
fn files(family: &str) -> impl Iterator<Item = String> {
    let paths = ["hf", "model.gguf"].map(|file| format!("families/{family}/{file}"));
    paths
        .into_iter()
        .filter(|path| reference().join(path).exists())
}

fn open(device: &Vulkan, path: &str) -> Result<OnDevice, lacuna_models::ExecutorError> {
    let elements = KvElements::both(ElementType::F32);
    OnDevice::on(device, path, elements, KvPolicy::default())
}

fn refused(family: &str) -> Option<&'static str> {
    let found = REFUSED.iter().find(|(refused, _)| *refused == family);
    found.map(|(_, what)| *what)
}

/// What is wrong with a fixture on the device, if something is.
fn compared(device: &Vulkan, family: &str, path: &str) -> Result<String, String> {
    match (open(device, path), refused(family)) {
        (Ok(_), Some(what)) => Err(format!("runs, but is listed as refused for {what}")),
        (Err(error), None) => Err(error.to_string()),
        (Err(error), Some(what)) => match error.to_string().contains(what) {
            true => Ok(format!("refused: {what}")),
            false => Err(format!("refused for {error}, not {what}")),
        },
        (Ok(mut model), None) => {
            let tokens = expected(&format!("families/{family}")).tokens;
            let found = model.logits(&tokens);
            let wanted = OnProcessor::open(path, ElementType::F32).logits(&tokens);
            let apart = relative_l2(&found, &wanted);
            match apart <= bound(&model.model) {
                true => Ok(format!("{apart:.2e}")),
                false => Err(format!("{apart:.2e} from the processor")),
            }
        }
    }
}

fn check(results: impl Iterator<Item = (String, Result<String, String>)>) {
    let mut wrong = Vec::new();
    for (path, result) in results {
        match result {
            Ok(how) => println!("{path}: {how}"),
            Err(what) => wrong.push(format!("{path}: {what}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn every_fixture_is_as_on_the_processor_or_is_refused_by_name() {
    let device = open_device();
    let families = families();
    assert!(
        REFUSED
            .iter()
            .all(|(family, _)| families.iter().any(|it| it == family)),
        "refusals are those of fixtures"
    );
    let paths = families
        .iter()
        .flat_map(|family| files(family).map(move |path| (family, path)));
    check(paths.map(|(family, path)| {
        let result = compared(&device, family, &path);
        (path, result)
    }));
}

/// What a model gives token after token, in chunks, and beside another sequence, is what it gives in one pass.
fn is_the_same(mut model: OnDevice) -> Result<String, String> {
    let tokens = some_tokens(150, model.vocabulary());
    let whole = model.logits(&tokens);
    if let Some(at) = whole.iter().position(|logit| !logit.is_finite()) {
        return Err(format!("logit {at} is {}", whole[at]));
    }
    for chunk in [1, 6, 64] {
        let mut sequence = model.sequence();
        let chunks = tokens.chunks(chunk);
        let pieces = chunks.flat_map(|chunk| model.extend(&mut sequence, chunk));
        let pieces: Vec<f32> = pieces.collect();
        if pieces != whole {
            return Err(format!("chunks of {chunk} differ"));
        }
    }
    // Beside another sequence of another length, which has come as far by then; and forked.
    let width = model.vocabulary();
    let (start, rest) = tokens.split_at(90);
    let others = some_tokens(21, 13);
    let mut first = model.sequence();
    model.extend(&mut first, start);
    let mut second = first.fork().expect("pages are shared");
    let mut third = model.sequence();
    model.extend(&mut third, &others[..5]);
    let mut all = [
        (&mut third, &others[5..]),
        (&mut first, rest),
        (&mut second, &rest[..7]),
    ];
    let together = model.pass(&mut all, LogitRows::All);
    let (of_third, of_others) = together.split_at(16 * width);
    let (of_first, of_second) = of_others.split_at(rest.len() * width);
    if of_first != &whole[90 * width..] {
        return Err("beside another it differs".to_owned());
    }
    if of_second != &whole[90 * width..97 * width] {
        return Err("forked it differs".to_owned());
    }
    first.accept(rest.len());
    second.accept(7);
    third.accept(16);
    if of_third != &model.logits(&others)[5 * width..] {
        return Err("the other differs".to_owned());
    }
    // And the fork goes on as the one it was forked from did.
    if model.extend(&mut second, &rest[7..]) != whole[97 * width..] {
        return Err("the fork goes on differently".to_owned());
    }
    Ok("the same".to_owned())
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn every_fixture_that_runs_gives_the_same_bits_however_it_is_cut_or_batched() {
    let device = open_device();
    let families = families();
    let running = families.iter().filter(|family| refused(family).is_none());
    check(running.filter_map(|family| {
        let path = files(family).last()?;
        let model = open(&device, &path).map_err(|error| error.to_string());
        Some((path, model.and_then(is_the_same)))
    }));
}

/// Fixtures whose later layers read the rows of earlier ones, and where they can be cut.
const CUTS: [(&str, usize); 2] = [("gemma3n", 2), ("gemma4", 2)];

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn every_fixture_is_as_on_the_processor_with_its_first_half_there() {
    let device = open_device();
    let families = families();
    check(families.iter().filter_map(|family| {
        let path = files(family).last()?;
        let mut processor = OnProcessor::open(&path, ElementType::F32);
        let known = CUTS.iter().find(|(name, _)| name == family);
        let half = processor.model.spec().layers.len() / 2;
        let host_layers = known.map_or(half, |(_, layers)| *layers);
        let elements = KvElements::both(ElementType::F32);
        let policy = KvPolicy::default();
        let opened = OnDevice::behind(&device, (&path, host_layers), elements, policy);
        let result = opened.map_err(|error| error.to_string()).and_then(|model| {
            let mut model = model;
            let tokens = expected(&format!("families/{family}")).tokens;
            let (found, wanted) = (model.logits(&tokens), processor.logits(&tokens));
            let apart = relative_l2(&found, &wanted);
            match apart <= bound(&model.model) {
                true => Ok(format!("{apart:.2e} behind {host_layers} layers")),
                false => Err(format!(
                    "{apart:.2e} from the processor behind {host_layers} layers"
                )),
            }
        });
        Some((path, result))
    }));
}

/// Windows, states of both kinds, latent rows, and rows of other layers.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_split_gives_the_same_bits_however_it_is_cut_or_batched() {
    let device = open_device();
    let cut = [
        ("gemma2", 2),
        ("qwen3.5", 2),
        ("mamba2", 1),
        ("deepseek-v3", 1),
        ("gemma3n", 2),
    ];
    check(cut.into_iter().filter_map(|(family, host_layers)| {
        let path = files(family).last()?;
        let elements = KvElements::both(ElementType::F32);
        let policy = KvPolicy::default();
        let model = OnDevice::behind(&device, (&path, host_layers), elements, policy);
        let model = model.map_err(|error| error.to_string());
        Some((path, model.and_then(is_the_same)))
    }));
}
