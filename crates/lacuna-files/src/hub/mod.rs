//! Models from a Hugging Face hub, kept in the cache that its other clients use.
//!
//! ```text
//! <cache>/models--owner--name/
//!     blobs/<hash>                      contents, complete and verified
//!     blobs/<hash>.lacuna.incomplete    a download that will be continued
//!     snapshots/<commit>/<file>         links to blobs
//!     refs/<branch>                     the commit a branch was at
//!     .lacuna/<commit>                  what was fetched here of it: bytes and names
//!     .lacuna/new-*                     what is being made, to be renamed to its place
//! ```
//!
//! A file appears under its name only after all of it has arrived and its length (and, where the
//! hub states one, its SHA-256 or Git's SHA-1) is right, so an interrupted download is never taken for a model.
//! What was fetched here, and is as it was then, is used without asking the hub. Of what another
//! client left, or what has lost bytes since, the hub is asked once what there is at that commit, and
//! what is missing is fetched; where it does not answer, what is there must do. Delete the folder to
//! fetch a model anew.
//!
//! The protocol is spoken here, over [`ureq`], rather than through `hf-hub`: version 0.5 of that
//! crate does not compare the length of what it received with what it should be, appends to a
//! partial file even when the server restarts from the beginning, and ignores `HF_HUB_CACHE` and
//! `HF_TOKEN`; version 1.0 needs an asynchronous runtime and some 280 crates.

mod cache;
mod client;
mod error;
mod held;
mod select;
mod settings;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::PathBuf;

pub use error::Error;
pub use held::HeldModel;
pub use settings::Settings;

use self::cache::{Found, Repository, length};
use self::client::Client;
use self::held::files_of;
use self::select::{Choice, choose, choose_again};
use super::huggingface;
use super::progress::Progress;
use super::source::HubId;

/// A hub and its cache.
#[derive(Debug)]
pub struct Hub {
    settings: Settings,
    client: Client,
}

/// A file of a repository, as the hub describes it.
#[derive(Clone, Debug)]
struct RemoteFile {
    path: String,
    /// Bytes, when the hub says.
    size: Option<u64>,
    /// The name of its contents in the cache.
    blob: String,
    /// What its contents must hash to, when the hub says.
    hash: Option<ContentHash>,
}

/// What a hub says that contents hash to, in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ContentHash {
    /// Of large files.
    Sha256(String),
    /// Of those in the repository itself, as Git counts them: the length is hashed first.
    GitSha1(String),
}

/// A repository at one commit.
#[derive(Debug)]
struct Listing {
    commit: String,
    files: Vec<RemoteFile>,
}

impl Hub {
    /// A hub with these settings; nothing is requested yet.
    pub fn new(settings: Settings) -> Self {
        let client = Client::new(&settings);
        Self { settings, client }
    }

    /// Finds a model in the cache, or downloads what it needs: the path of a GGUF file, or of a
    /// folder with `config.json`, tokenizer and safetensors.
    ///
    /// # Errors
    /// [`Error`]. After an interruption, calling again continues where it stopped.
    pub fn fetch(&self, id: &HubId, progress: &mut dyn Progress) -> Result<PathBuf, Error> {
        let repository = Repository::new(&self.settings.cache, id.repository());
        let cached = repository.find(id)?;
        if let Some(found) = &cached
            && found.complete
        {
            return Ok(found.path.clone());
        }
        // What is there is completed rather than replaced by what a branch is at now.
        let revision = cached.as_ref().map_or(id.revision(), |found| &found.commit);
        let listing = match (self.list(id, revision), &cached) {
            // Better a model of which something may be missing than none.
            (Err(error), Some(found)) if error.says_nothing() => return Ok(found.path.clone()),
            (listing, _) => listing?,
        };
        let downloaded = self.download(&repository, id, listing, cached.as_ref(), progress);
        match (downloaded, cached) {
            (Err(error), Some(found)) if error.leaves_what_is_there() => Ok(found.path),
            (result, _) => result,
        }
    }

    /// The models in the cache, by name, whoever put them there.
    #[must_use]
    pub fn held(&self) -> Vec<HeldModel> {
        held::held(&self.settings.cache)
    }

    /// Takes a model out of the cache, and returns the bytes that this frees. With a file in its id it
    /// is that model alone, and otherwise all that the cache has of the repository.
    ///
    /// # Errors
    /// [`Error::NotHeld`], [`Error::Busy`] while another process downloads of the repository, and
    /// [`Error::Cache`].
    pub fn remove(&self, id: &HubId) -> Result<u64, Error> {
        held::remove(&self.settings.cache, id)
    }

    fn list(&self, id: &HubId, revision: &str) -> Result<Listing, Error> {
        if self.settings.offline {
            return Err(Error::Offline {
                id: id.to_string(),
                cache: self.settings.cache.clone(),
            });
        }
        self.client.list(id, revision)
    }

    fn download(
        &self,
        repository: &Repository,
        id: &HubId,
        mut listing: Listing,
        found: Option<&Found>,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf, Error> {
        let mut mark = repository.mark(&listing.commit);
        for file in &mut listing.files {
            // Where the hub does not say it, it is as long as it was.
            file.size = file.size.or_else(|| mark.get(&file.path).copied());
        }
        let names: Vec<&str> = listing
            .files
            .iter()
            .map(|file| file.path.as_str())
            .collect();
        let choice = match found {
            Some(found) => match choose_again(&found.choice, &names) {
                Some(choice) => choice,
                // Something of one's own, to which the hub has nothing to add.
                None => return Ok(found.path.clone()),
            },
            None => choose(&names, id)?,
        };
        let files = listing.files.iter();
        let files: HashMap<&str, &RemoteFile> =
            files.map(|file| (file.path.as_str(), file)).collect();
        let mut fetch = |name: &str| match files.get(name) {
            Some(file) => self.download_file(repository, id, &listing.commit, file, progress),
            None => Err(Error::NoSuchFile {
                id: id.to_string(),
                file: name.to_owned(),
                choices: Vec::new(),
            }),
        };
        for name in choice.files() {
            fetch(name)?;
        }
        let snapshot = repository.snapshot(&listing.commit);
        if let Choice::Folder { indexed: true, .. } = choice {
            let index = huggingface::index_in(&snapshot)?;
            for name in index.iter().flat_map(huggingface::Index::files) {
                fetch(name)?;
            }
        }
        for name in files_of(&choice, &snapshot) {
            if let Some(bytes) = length(&snapshot.join(&name)) {
                mark.insert(name, bytes);
            }
        }
        // Without it the hub is asked again, and that is all.
        repository.set_mark(&listing.commit, &mark).ok();
        repository.set_reference(id.revision(), &listing.commit)?;
        Ok(choice.entry(&snapshot))
    }

    fn download_file(
        &self,
        repository: &Repository,
        id: &HubId,
        commit: &str,
        file: &RemoteFile,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        if repository.has_file(commit, file) {
            return Ok(());
        }
        if !repository.has_blob(file) {
            let mut partial = repository.partial(file)?;
            // Another process may have finished it before this one had the lock.
            if repository.has_blob(file) {
                partial.discard()?;
            } else {
                let received = self
                    .client
                    .download(id, commit, file, &mut partial, progress)?;
                partial.complete(file, received)?;
            }
        }
        repository.remove_leftover(file);
        repository.link(commit, file)
    }
}
