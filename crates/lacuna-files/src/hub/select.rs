//! Which files of a repository make up the model asked for. Pure: names in, names out.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::error::Error;
use crate::huggingface::{CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE};
use crate::source::HubId;

/// The file a tokenizer is built from.
const TOKENIZER_FILE: &str = "tokenizer.json";
/// What is worth having beside the weights, where it exists.
const COMPANIONS: [&str; 9] = [
    CONFIG_FILE,
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
];
/// What ends the names of what sentence-transformers does with a model's rows, in folders of their own.
const MODULE_ENDINGS: [&str; 4] = [
    "_Pooling/config.json",
    "_LogitScore/config.json",
    "_Dense/config.json",
    "_Dense/model.safetensors",
];

/// The files of one model.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// A Hugging Face folder; weights named by its index follow when `indexed`.
    Folder { files: Vec<String>, indexed: bool },
    /// One GGUF file, or all files of a split one, in order.
    Gguf { files: Vec<String> },
}

impl Choice {
    /// What to download, small files first.
    pub(super) fn files(&self) -> &[String] {
        match self {
            Self::Folder { files, .. } | Self::Gguf { files } => files,
        }
    }

    /// What to open.
    pub(super) fn entry(&self, snapshot: &Path) -> PathBuf {
        match self {
            Self::Folder { .. } => snapshot.to_owned(),
            Self::Gguf { files } => files
                .first()
                .map_or(snapshot.to_owned(), |name| snapshot.join(name)),
        }
    }
}

/// Chooses among `names`: the GGUF file asked for; else safetensors; else the only GGUF model.
pub(super) fn choose(names: &[&str], id: &HubId) -> Result<Choice, Error> {
    let models = gguf_models(names);
    if let Some(wanted) = id.file() {
        return match models.iter().find(|name| matches(name, wanted)) {
            Some(first) => gguf(first, &set(names), id.repository()),
            None => Err(Error::NoSuchFile {
                id: id.repository().to_owned(),
                file: wanted.to_owned(),
                choices: owned(&models),
            }),
        };
    }
    if let Some(folder) = folder(names) {
        return Ok(folder);
    }
    match models.as_slice() {
        [] => Err(Error::NoModel { id: id.to_string() }),
        [only] => gguf(only, &set(names), id.repository()),
        _ => Err(Error::Ambiguous {
            id: id.to_string(),
            choices: owned(&models),
        }),
    }
}

/// The same choice among other `names`: what is there of a model is completed by what else a hub has of
/// it, whatever other models it has.
pub(super) fn choose_again(choice: &Choice, names: &[&str]) -> Option<Choice> {
    match choice {
        Choice::Folder { .. } => folder(names),
        Choice::Gguf { files } => {
            let known = set(names);
            let all = files.iter().all(|name| known.contains(name.as_str()));
            all.then(|| Choice::Gguf {
                files: files.clone(),
            })
        }
    }
}

/// Every model that one could open among `names`.
pub(super) fn every_choice(names: &[&str]) -> Vec<Choice> {
    let first_files = gguf_models(names).into_iter();
    // Of a split model a part may be missing.
    let known = set(names);
    let models = first_files.filter_map(|first| gguf(first, &known, "").ok());
    folder(names).into_iter().chain(models).collect()
}

/// A model has up to 99,999 files, each of which is looked for.
fn set<'a>(names: &[&'a str]) -> HashSet<&'a str> {
    names.iter().copied().collect()
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

fn folder(names: &[&str]) -> Option<Choice> {
    let has = |name: &str| names.contains(&name);
    let weights = [WEIGHTS_FILE, INDEX_FILE]
        .into_iter()
        .find(|name| has(name))?;
    if !has(CONFIG_FILE) {
        return None;
    }
    let mut files: Vec<&str> = COMPANIONS.into_iter().filter(|name| has(name)).collect();
    let is_module = |name: &str| {
        let ends = MODULE_ENDINGS.iter().any(|ending| name.ends_with(ending));
        ends && name.matches('/').count() == 1
    };
    files.extend(names.iter().copied().filter(|name| is_module(name)));
    files.push(weights);
    Some(Choice::Folder {
        files: owned(&files),
        indexed: weights == INDEX_FILE,
    })
}

/// The GGUF files one could open: whole ones, and the first of split ones. Projectors of
/// vision models are no language models.
fn gguf_models<'a>(names: &[&'a str]) -> Vec<&'a str> {
    let model = |name: &&&str| {
        let file = name.rsplit('/').next().unwrap_or(name);
        name.ends_with(".gguf")
            && !file.starts_with("mmproj")
            && shard(name).is_none_or(|shard| shard.number == 1)
    };
    let mut models: Vec<&str> = names.iter().filter(model).copied().collect();
    models.sort_unstable();
    models
}

/// Whether a file is the one asked for: by path, or by the quantization its name ends with.
fn matches(name: &str, wanted: &str) -> bool {
    if wanted.ends_with(".gguf") {
        return name == wanted;
    }
    let stem = match shard(name) {
        Some(shard) => shard.stem,
        None => name.strip_suffix(".gguf").unwrap_or(name),
    };
    let stem = stem.to_ascii_lowercase();
    let rest = stem.strip_suffix(&wanted.to_ascii_lowercase());
    rest.is_some_and(|rest| rest.is_empty() || rest.ends_with(['-', '.', '_', '/']))
}

/// A name of the form `stem-00001-of-00003.gguf`.
struct Shard<'a> {
    stem: &'a str,
    number: u32,
    count: u32,
}

fn shard(name: &str) -> Option<Shard<'_>> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five = |digits: &str| (digits.len() == 5).then(|| digits.parse().ok()).flatten();
    Some(Shard {
        stem,
        number: five(number)?,
        count: five(count)?,
    })
}

fn gguf(first: &str, names: &HashSet<&str>, repository: &str) -> Result<Choice, Error> {
    let Some(shard) = shard(first) else {
        return Ok(Choice::Gguf {
            files: vec![first.to_owned()],
        });
    };
    let mut files = Vec::new();
    for number in 1..=shard.count {
        let file = format!("{}-{number:05}-of-{:05}.gguf", shard.stem, shard.count);
        if !names.contains(&file.as_str()) {
            return Err(Error::NoSuchFile {
                id: repository.to_owned(),
                file,
                choices: Vec::new(),
            });
        }
        files.push(file);
    }
    Ok(Choice::Gguf { files })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&str], id: &str) -> Result<Choice, Error> {
        choose(names, &id.parse().unwrap())
    }

    #[test]
    fn safetensors_come_with_their_companions_and_nothing_else() {
        let names = [
            "README.md",
            "config.json",
            "tokenizer.json",
            "model.safetensors",
            "pytorch_model.bin",
        ];
        let choice = chosen(&names, "a/b").unwrap();
        assert_eq!(
            choice.files(),
            ["config.json", "tokenizer.json", "model.safetensors"]
        );
        assert_eq!(choice.entry(Path::new("s")), Path::new("s"));
        let choice = chosen(&["config.json", "model.safetensors.index.json"], "a/b").unwrap();
        assert!(matches!(choice, Choice::Folder { indexed: true, .. }));
    }

    #[test]
    fn what_says_how_texts_are_pooled_comes_with_an_encoder() {
        let names = [
            "config.json",
            "modules.json",
            "1_Pooling/config.json",
            "onnx/1_Pooling/config.json",
            "2_Dense/config.json",
            "2_Dense/model.safetensors",
            "sentence_bert_config.json",
            "model.safetensors",
        ];
        assert_eq!(
            chosen(&names, "a/b").unwrap().files(),
            [
                names[0], names[1], names[6], names[2], names[4], names[5], names[7]
            ]
        );
    }

    #[test]
    fn a_gguf_file_is_chosen_by_name_by_quantization_or_by_being_alone() {
        let names = [
            "m-Q8_0.gguf",
            "m-Q4_0.gguf",
            "mmproj-f16.gguf",
            "config.json",
        ];
        assert_eq!(
            chosen(&names, "a/b:m-Q4_0.gguf").unwrap().files(),
            ["m-Q4_0.gguf"]
        );
        assert_eq!(chosen(&names, "a/b:q8_0").unwrap().files(), ["m-Q8_0.gguf"]);
        assert!(
            matches!(chosen(&names, "a/b"), Err(Error::Ambiguous { choices, .. }) if choices.len() == 2)
        );
        assert!(
            matches!(chosen(&names, "a/b:_0"), Err(Error::NoSuchFile { choices, .. }) if choices.len() == 2)
        );
        assert_eq!(
            chosen(&names[1..], "a/b").unwrap().entry(Path::new("s")),
            Path::new("s/m-Q4_0.gguf")
        );
        assert!(matches!(
            chosen(&["README.md"], "a/b"),
            Err(Error::NoModel { .. })
        ));
    }

    /// Comparing each name with each took minutes: five thousand million comparisons of equal lengths.
    #[test]
    fn a_model_of_as_many_files_as_names_allow_is_chosen_soon() {
        let names: Vec<String> = (1..=99_999)
            .map(|number| format!("model-Q8_0-{number:05}-of-99999.gguf"))
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let choice = chosen(&names, "a/b").unwrap();
        assert_eq!(choice.files(), names);
        assert_eq!(every_choice(&names), [choice]);
    }

    #[test]
    fn a_message_names_some_of_many_files() {
        let names: Vec<String> = (0..1000)
            .map(|number| format!("m{number:03}.gguf"))
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        for id in ["a/b", "a/b:none"] {
            let message = chosen(&names, id).unwrap_err().to_string();
            assert!(message.contains("m000.gguf, m001.gguf"), "{message}");
            assert!(message.ends_with("and 980 more"), "{message}");
        }
    }

    #[test]
    fn a_split_gguf_model_is_all_its_files() {
        let names = [
            "q/m-Q8_0-00002-of-00002.gguf",
            "q/m-Q8_0-00001-of-00002.gguf",
        ];
        for id in ["a/b", "a/b:Q8_0", "a/b:q/m-Q8_0-00001-of-00002.gguf"] {
            let choice = chosen(&names, id).unwrap();
            assert_eq!(choice.files(), [names[1], names[0]], "{id}");
        }
        assert!(matches!(
            chosen(&names[1..], "a/b"),
            Err(Error::NoSuchFile { .. })
        ));
    }
}
