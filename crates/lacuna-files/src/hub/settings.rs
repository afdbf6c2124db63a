//! Where the hub and its cache are, by the environment variables that its other clients read.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::error::Error;

/// The hub to ask when `HF_ENDPOINT` names no other.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// A hub, a cache and a token.
#[derive(Clone, PartialEq, Eq)]
pub struct Settings {
    /// The hub's address, without a slash at the end.
    pub endpoint: String,
    /// The folder that has a folder per model.
    pub cache: PathBuf,
    /// The access token to send to the hub, and to nobody else.
    pub token: Option<String>,
    /// Never to ask the hub.
    pub offline: bool,
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings")
            .field("endpoint", &without_user(&self.endpoint))
            .field("cache", &self.cache)
            .field("token", &self.token.as_ref().map(|_| "..."))
            .field("offline", &self.offline)
            .finish()
    }
}

impl Settings {
    /// Reads `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HOME` (else `XDG_CACHE_HOME` or `~/.cache`),
    /// `HF_TOKEN` (else the file at `HF_TOKEN_PATH` or `$HF_HOME/token`) and `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// [`Error::NoHome`] when nothing says where the cache is.
    pub fn from_env() -> Result<Self, Error> {
        Self::from_variables(|name| env::var_os(name))
    }

    /// As [`from_env`](Self::from_env), with variables from elsewhere. Empty ones count as unset.
    pub(super) fn from_variables(
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, Error> {
        let get = |name: &str| variable(name).filter(|value| !value.is_empty());
        let path = |name: &str| get(name).map(PathBuf::from);
        let text = |name: &str| get(name).and_then(|value| value.into_string().ok());
        let cache_home =
            || path("XDG_CACHE_HOME").or_else(|| path("HOME").map(|home| home.join(".cache")));
        let home = path("HF_HOME").or_else(|| cache_home().map(|cache| cache.join("huggingface")));
        let cache = path("HF_HUB_CACHE").or_else(|| home.as_deref().map(|home| home.join("hub")));
        let token_path = path("HF_TOKEN_PATH").or_else(|| home.map(|home| home.join("token")));
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache: cache.ok_or(Error::NoHome)?,
            token: text("HF_TOKEN")
                .and_then(|token| trimmed(&token))
                .or_else(|| token_path.as_deref().and_then(read_token)),
            offline: text("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value)),
        })
    }
}

/// A URL as messages show it: without the user and the password that it may name.
pub(super) fn without_user(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let authority = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    match rest[..authority].rfind('@') {
        Some(at) => format!("{scheme}://{}", &rest[at + 1..]),
        None => url.to_owned(),
    }
}

fn read_token(path: &Path) -> Option<String> {
    std::fs::read_to_string(path)
        .ok()
        .as_deref()
        .and_then(trimmed)
}

/// A token without the ends of lines that copying brought along; none where nothing else is there.
fn trimmed(token: &str) -> Option<String> {
    Some(token.trim().to_owned()).filter(|token| !token.is_empty())
}

fn is_true(value: &str) -> bool {
    ["1", "ON", "YES", "TRUE"].contains(&value.to_ascii_uppercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings, Error> {
        Settings::from_variables(|name| {
            variables
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value.into())
        })
    }

    #[test]
    fn the_cache_is_where_the_variables_say() {
        let cache = |variables: &[(&str, &str)]| settings(variables).unwrap().cache;
        assert_eq!(
            cache(&[("HOME", "/h")]),
            Path::new("/h/.cache/huggingface/hub")
        );
        assert_eq!(
            cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]),
            Path::new("/x/huggingface/hub")
        );
        assert_eq!(
            cache(&[("HOME", "/h"), ("HF_HOME", "/f")]),
            Path::new("/f/hub")
        );
        assert_eq!(
            cache(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]),
            Path::new("/c")
        );
        assert!(matches!(settings(&[("HOME", "")]), Err(Error::NoHome)));
    }

    #[test]
    fn urls_are_shown_without_their_users() {
        for (url, shown) in [
            ("http://user:p@ss@hub:1/a@b", "http://hub:1/a@b"),
            ("https://hub/a?b=c@d", "https://hub/a?b=c@d"),
            ("hub", "hub"),
        ] {
            assert_eq!(without_user(url), shown);
        }
    }

    #[test]
    fn token_endpoint_and_offline_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        let plain = settings(&[("HF_HOME", home)]).unwrap();
        assert_eq!((plain.token, plain.offline), (None, false));
        assert_eq!(plain.endpoint, DEFAULT_ENDPOINT);
        std::fs::write(folder.path().join("token"), "from file\n").unwrap();
        assert_eq!(
            settings(&[("HF_HOME", home)]).unwrap().token.as_deref(),
            Some("from file")
        );
        let blank = settings(&[("HF_HOME", home), ("HF_TOKEN", " \n")]).unwrap();
        assert_eq!(blank.token.as_deref(), Some("from file"));
        let other = [
            ("HF_HOME", home),
            ("HF_TOKEN", "secret\r\n"),
            ("HF_HUB_OFFLINE", "1"),
        ];
        let other = settings(&[&other[..], &[("HF_ENDPOINT", "http://mirror/")]].concat()).unwrap();
        assert_eq!(
            (other.token.as_deref(), other.offline),
            (Some("secret"), true)
        );
        assert_eq!(other.endpoint, "http://mirror");
        assert!(!format!("{other:?}").contains("secret"));
        let mirror = settings(&[("HOME", "/h"), ("HF_ENDPOINT", "http://user:secret@mirror")]);
        assert!(!format!("{mirror:?}").contains("secret"));
    }
}
