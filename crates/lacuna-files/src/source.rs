//! What a user means by `<model>`: the demo model, a file, a folder, or a model on a hub.

use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

/// The word for the model that ships with the program.
const DEMO: &str = "demo";
/// The longest hub owner or model name.
const HUB_NAME_LIMIT: usize = 96;

/// Where a model is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// The model that ships with the program.
    Demo,
    /// A file that exists.
    File(PathBuf),
    /// A folder that exists.
    Folder(PathBuf),
    /// A model on a hub, downloaded or in its cache.
    Hub(HubId),
}

/// Why a word is no model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// Looks like a path, and there is nothing there.
    #[error(
        "no file or folder `{text}`; check the path, or name a model as `owner/name` to download it"
    )]
    NoSuchPath {
        /// What was given.
        text: String,
    },
    /// The demo model where one is to be fetched.
    #[error("the model `demo` is a part of the program: it is there without being fetched")]
    NotFetched,
    /// Neither a path that exists nor the form of a hub id.
    #[error(
        "`{text}` is no model: it is not `demo`, no file or folder of this name exists, and it is not a \
         hub id of the form owner/name, owner/name@revision or owner/name:file.gguf"
    )]
    NotAModel {
        /// What was given.
        text: String,
    },
}

impl ModelSource {
    /// Decides what `text` names. `demo` is the demo model; then an existing path wins over a hub
    /// id.
    ///
    /// ```
    /// use lacuna_files::ModelSource;
    ///
    /// assert_eq!(ModelSource::parse("demo")?, ModelSource::Demo);
    /// assert!(matches!(ModelSource::parse("Qwen/Qwen3-0.6B")?, ModelSource::Hub(_)));
    /// assert!(ModelSource::parse("missing.gguf").is_err());
    /// # Ok::<(), lacuna_files::SourceError>(())
    /// ```
    ///
    /// # Errors
    /// [`SourceError`], saying what was tried.
    pub fn parse(text: &str) -> Result<Self, SourceError> {
        if text == DEMO {
            return Ok(Self::Demo);
        }
        let path = Path::new(text);
        if path.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        if path.exists() {
            return Ok(Self::File(path.to_owned()));
        }
        if looks_like_a_path(text) {
            return Err(SourceError::NoSuchPath {
                text: text.to_owned(),
            });
        }
        text.parse().map(Self::Hub)
    }
}

fn looks_like_a_path(text: &str) -> bool {
    let starts = ["/", "./", "../", "~", "\\"]
        .iter()
        .any(|start| text.starts_with(start));
    let is_file = text.ends_with(".gguf") || text.ends_with(".safetensors");
    starts || text.ends_with('/') || (is_file && !text.contains(':'))
}

/// A model on a hub: `owner/name`, optionally `@revision`, optionally `:file`.
///
/// The file is a GGUF file's path in the repository, or a quantization such as `Q8_0` that one of
/// its file names ends with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HubId {
    repository: String,
    revision: Option<String>,
    file: Option<String>,
}

impl HubId {
    /// `owner/name`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The branch, tag or commit asked for; `main` when none was.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// The GGUF file or quantization asked for.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }
}

impl FromStr for HubId {
    type Err = SourceError;

    fn from_str(text: &str) -> Result<Self, SourceError> {
        if text == DEMO {
            return Err(SourceError::NotFetched);
        }
        let (rest, file) = split_tail(text, ':');
        let (repository, revision) = split_tail(rest, '@');
        let names: Vec<&str> = repository.split('/').collect();
        let valid = names.len() == 2
            && names.into_iter().all(is_hub_name)
            && revision.is_none_or(is_relative)
            && file.is_none_or(is_relative);
        if !valid {
            return Err(SourceError::NotAModel {
                text: text.to_owned(),
            });
        }
        Ok(Self {
            repository: repository.to_owned(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }
}

impl fmt::Display for HubId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        if let Some(file) = &self.file {
            write!(f, ":{file}")?;
        }
        Ok(())
    }
}

fn split_tail(text: &str, separator: char) -> (&str, Option<&str>) {
    match text.split_once(separator) {
        Some((head, tail)) => (head, Some(tail)),
        None => (text, None),
    }
}

fn is_hub_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=HUB_NAME_LIMIT).contains(&name.len())
        && name.chars().all(plain)
        && !name.starts_with(['-', '.'])
        && !name.contains("..")
        // It separates owner and name in a cache; hubs give no such names.
        && !name.contains("--")
}

/// Whether text is a relative path that stays below where it starts, so that it can be one in a
/// cache.
pub(super) fn is_relative(text: &str) -> bool {
    let mut components = Path::new(text).components().peekable();
    components.peek().is_some()
        && components.all(|component| matches!(component, Component::Normal(_)))
        && !text.contains(['\\', '\0', '?', '#'])
        && !text.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids_have_an_owner_a_name_and_options() {
        let id: HubId = "Qwen/Qwen3-0.6B@v1.0:folder/model-Q8_0.gguf"
            .parse()
            .unwrap();
        assert_eq!(id.repository(), "Qwen/Qwen3-0.6B");
        assert_eq!(
            (id.revision(), id.file()),
            ("v1.0", Some("folder/model-Q8_0.gguf"))
        );
        assert_eq!(
            id.to_string(),
            "Qwen/Qwen3-0.6B@v1.0:folder/model-Q8_0.gguf"
        );
        let id: HubId = "a/b".parse().unwrap();
        assert_eq!((id.revision(), id.file()), ("main", None));
        assert_eq!("a/b:Q4_0".parse::<HubId>().unwrap().file(), Some("Q4_0"));
    }

    #[test]
    fn what_could_leave_the_cache_is_no_hub_id() {
        for text in [
            "",
            "name",
            "a/b/c",
            "a/",
            "/b",
            "../b",
            "a/..",
            ".a/b",
            "a/-b",
            "a--b/c",
            "a/b--c",
            "a b/c",
            "a/b@",
            "a/b:",
            "a/b@../x",
            "a/b:/etc/x",
            "a/b:..",
            "a/b@x?y",
            "é/b",
        ] {
            assert!(text.parse::<HubId>().is_err(), "{text}");
        }
        assert!(format!("a/{}", "b".repeat(97)).parse::<HubId>().is_err());
    }

    #[test]
    fn an_existing_path_wins_over_a_hub_id() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        assert_eq!(
            ModelSource::parse(path).unwrap(),
            ModelSource::Folder(path.into())
        );
        let file = format!("{path}/model.gguf");
        assert!(matches!(
            ModelSource::parse(&file),
            Err(SourceError::NoSuchPath { .. })
        ));
        std::fs::write(&file, b"x").unwrap();
        assert_eq!(
            ModelSource::parse(&file).unwrap(),
            ModelSource::File(file.into())
        );
        // Tests run in the package's folder: `src/gguf` has the form of a hub id, and exists.
        assert_eq!(
            ModelSource::parse("src/gguf").unwrap(),
            ModelSource::Folder("src/gguf".into())
        );
    }

    #[test]
    fn the_demo_model_is_there_without_being_fetched() {
        let error = "demo".parse::<HubId>().unwrap_err();
        assert_eq!(error, SourceError::NotFetched);
        assert!(error.to_string().contains("a part of the program"));
    }

    #[test]
    fn what_is_neither_says_what_was_tried() {
        for text in ["./none", "/none", "~/none", "some/model.gguf", "none/"] {
            assert!(
                matches!(
                    ModelSource::parse(text),
                    Err(SourceError::NoSuchPath { .. })
                ),
                "{text}"
            );
        }
        let error = ModelSource::parse("nonsense").unwrap_err();
        assert!(error.to_string().contains("owner/name"), "{error}");
        assert!(matches!(
            ModelSource::parse("a/b:x.gguf"),
            Ok(ModelSource::Hub(_))
        ));
    }
}
