//! What an embedding model's makers put in front of texts, by name.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::error::ConfigError;
use lacuna_files::Metadata;

/// Where sentence-transformers has it in a folder. GGUF files do not say it.
const SETTINGS: &str = "config_sentence_transformers.json";

/// What is put in front of a text for what it is to be used for, such as `query` and `document`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Prompts {
    prompts: BTreeMap<String, String>,
    default_prompt_name: Option<String>,
}

/// A prompt that the model's folder does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the model has no prompt `{name}`; {}", hint(known))]
pub struct UnknownPrompt {
    /// What was asked for.
    pub name: String,
    /// What there is.
    pub known: Vec<String>,
}

fn hint(known: &[String]) -> String {
    match known.is_empty() {
        true => "its files name none, so write it in front of the text".to_owned(),
        false => format!("it has {}", known.join(", ")),
    }
}

impl Prompts {
    /// What the files of a model say.
    pub(crate) fn of(metadata: &Metadata) -> Result<Self, ConfigError> {
        let settings = match metadata {
            Metadata::Gguf(_) => None,
            Metadata::HuggingFace(folder) => folder.json(SETTINGS)?,
        };
        Ok(settings.unwrap_or_default())
    }

    /// The names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.prompts.keys().map(String::as_str)
    }

    /// The prompt of a name, or what goes in front where none is asked for.
    ///
    /// # Errors
    /// [`UnknownPrompt`].
    pub fn get(&self, name: Option<&str>) -> Result<&str, UnknownPrompt> {
        let Some(name) = name.or(self.default_prompt_name.as_deref()) else {
            return Ok("");
        };
        let found = self.prompts.get(name).map(String::as_str);
        found.ok_or_else(|| UnknownPrompt {
            name: name.to_owned(),
            known: self.prompts.keys().cloned().collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_go_by_name_or_by_what_the_folder_says() {
        let prompts = |text: &str| serde_json::from_str::<Prompts>(text).expect("settings");
        let usual = prompts(
            r#"{"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": null}"#,
        );
        assert_eq!(usual.get(Some("query")), Ok("q: "));
        assert_eq!(usual.get(Some("document")), Ok(""));
        assert_eq!(usual.get(None), Ok(""));
        let refused = usual.get(Some("passage")).expect_err("unknown");
        assert_eq!(refused.known, ["document", "query"]);
        let given = prompts(r#"{"prompts": {"query": "q: "}, "default_prompt_name": "query"}"#);
        assert_eq!(given.get(None), Ok("q: "));
        let shown = Prompts::default()
            .get(Some("query"))
            .expect_err("none")
            .to_string();
        assert!(shown.contains("name none"), "{shown}");
    }
}
