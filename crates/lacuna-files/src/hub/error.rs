//! What can go wrong between a hub and its cache.

use std::io;
use std::path::PathBuf;

use crate::huggingface;

/// Why a model could not be fetched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Downloads are switched off and the model is not in the cache.
    #[error("{id} is not in {}, and HF_HUB_OFFLINE forbids to download it; unset it, or name a model that is there", cache.display())]
    Offline {
        /// The model.
        id: String,
        /// The cache that was searched.
        cache: PathBuf,
    },
    /// The model is not in the cache.
    #[error("{id} is not in {}; `lacuna list` tells what is", cache.display())]
    NotHeld {
        /// The model.
        id: String,
        /// The cache that was searched.
        cache: PathBuf,
    },
    /// The hub cannot be reached and the model is not in the cache.
    #[error(
        "{url} cannot be reached ({reason}); check the connection, or HF_ENDPOINT and the proxy settings"
    )]
    Unreachable {
        /// What was requested.
        url: String,
        /// What went wrong.
        reason: String,
    },
    /// The hub refuses: the model is gated, private, or its name is wrong.
    #[error(
        "the hub refuses access to {id} (status {status}): if the model is gated, accept its terms at \
         {page} and set HF_TOKEN to an access token; if not, check the name"
    )]
    Refused {
        /// The model.
        id: String,
        /// The HTTP status, 401 or 403.
        status: u16,
        /// Where its terms are.
        page: String,
    },
    /// There is no such model, revision or file.
    #[error("the hub has no {url} (status 404); check the name, the revision and the file")]
    NotFound {
        /// What was requested.
        url: String,
    },
    /// The hub answers with another status.
    #[error("{url}: the hub answers with status {status}; try again later")]
    Status {
        /// What was requested.
        url: String,
        /// The HTTP status.
        status: u16,
    },
    /// The hub's answer makes no sense.
    #[error("{url}: the answer is not that of a hub ({reason}); check HF_ENDPOINT")]
    BadAnswer {
        /// What was requested.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// The repository has neither safetensors with a configuration nor GGUF files.
    #[error(
        "{id} has neither config.json with safetensors nor GGUF files; name a repository that has"
    )]
    NoModel {
        /// The model.
        id: String,
    },
    /// The file asked for is not in the repository.
    #[error("{id} has no file `{file}`{}", list(choices))]
    NoSuchFile {
        /// The model.
        id: String,
        /// The file.
        file: String,
        /// The GGUF files it has.
        choices: Vec<String>,
    },
    /// The repository has several GGUF models and none was chosen.
    #[error(
        "{id} has several GGUF models; choose one with {id}:file{}",
        list(choices)
    )]
    Ambiguous {
        /// The model.
        id: String,
        /// The GGUF files it has.
        choices: Vec<String>,
    },
    /// The connection ended early.
    #[error(
        "the download of {file} was interrupted after {received} bytes{}: {reason}; run the same command \
         again to continue", of(*expected)
    )]
    Interrupted {
        /// The file.
        file: String,
        /// Bytes received so far, and kept.
        received: u64,
        /// Bytes of the whole file.
        expected: Option<u64>,
        /// What ended it.
        reason: String,
    },
    /// What arrived is not what the hub announced.
    #[error(
        "the download of {file} is corrupt ({reason}), and was discarded; run the same command again"
    )]
    Corrupt {
        /// The file.
        file: String,
        /// How it differs.
        reason: String,
    },
    /// More arrived, or was announced, than the hub says the file has.
    #[error(
        "the download of {file} goes on past its {declared} bytes (to {received} at least), and was \
         discarded; check HF_ENDPOINT, and whether the file was replaced meanwhile"
    )]
    TooLong {
        /// The file.
        file: String,
        /// Bytes the hub says it has.
        declared: u64,
        /// Bytes that arrived or were announced.
        received: u64,
    },
    /// Nobody said how long the file is, and it is longer than anything taken then.
    #[error(
        "the hub does not say how long {file} is, and it has more than {limit} bytes; it was discarded: \
         check HF_ENDPOINT"
    )]
    Undeclared {
        /// The file.
        file: String,
        /// Bytes taken of a file of unknown length.
        limit: u64,
    },
    /// Another process is downloading the same file.
    #[error("another process is downloading {}; wait for it", path.display())]
    Busy {
        /// The partial file.
        path: PathBuf,
    },
    /// The cache cannot be written.
    #[error("{}: {source}; free some space, or set HF_HUB_CACHE to another folder", path.display())]
    Cache {
        /// What was being written.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The cached index of a model in several files is damaged.
    #[error(transparent)]
    Index(#[from] huggingface::Error),
    /// There is no home folder to keep a cache in.
    #[error("no folder for downloads: set HF_HOME or HOME")]
    NoHome,
}

impl Error {
    /// Whether the hub could not be asked, so that what the cache has must do.
    pub(super) fn is_connection(&self) -> bool {
        matches!(self, Self::Offline { .. } | Self::Unreachable { .. })
    }

    /// Whether what the cache has cannot be completed, so that it must do as it is: the hub cannot be
    /// asked, or the cache not be written to.
    pub(super) fn leaves_what_is_there(&self) -> bool {
        use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
        let fixed =
            |source: &io::Error| matches!(source.kind(), PermissionDenied | ReadOnlyFilesystem);
        self.is_connection() || matches!(self, Self::Cache { source, .. } if fixed(source))
    }

    /// Whether the hub did not say what a repository has, so that what the cache has must do: it cannot
    /// be asked, or fails, or has no more of it for whoever asks.
    pub(super) fn says_nothing(&self) -> bool {
        let refused = matches!(
            self,
            Self::Refused { .. } | Self::NotFound { .. } | Self::Status { .. }
        );
        refused || self.is_connection()
    }
}

fn of(expected: Option<u64>) -> String {
    expected
        .map(|bytes| format!(" of {bytes}"))
        .unwrap_or_default()
}

/// How many names a message has at most: what a hub sends has no bound that one could read.
const MOST_NAMES: usize = 20;

fn list(choices: &[String]) -> String {
    if choices.is_empty() {
        return String::new();
    }
    let named = &choices[..choices.len().min(MOST_NAMES)];
    let more = match choices.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("; it has {}{more}", named.join(", "))
}
