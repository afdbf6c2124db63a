//! Sessions that outlive the process: written to a file, and gone on with from there.

use std::path::Path;

use lacuna_kv::saved::{self, Saved};

use crate::engine::Engine;
use crate::error::{self, EngineError};
use crate::images;
use crate::sampler::Sampling;
use crate::session::Session;

impl Engine {
    /// Writes `session` to the file at `path`, with what its owner says about it in `note`. What was there stays if
    /// that fails.
    ///
    /// # Errors
    /// [`EngineError::Saved`], or [`EngineError::OtherEngine`] for a session that another engine made.
    pub fn save_session(
        &self,
        session: &mut Session,
        note: &str,
        path: &Path,
    ) -> Result<(), EngineError> {
        self.check_owns(session)?;
        let fingerprint = self.fingerprint(&folder_of(path));
        let fingerprint = fingerprint.map_err(error::saved(path))?;
        let Session {
            sequence, tokens, ..
        } = session;
        let about = (note, &tokens[..]);
        let written = saved::save(path, self.kv_cache(), sequence, about, &fingerprint);
        written.map_err(error::saved(path))
    }

    /// A session with the tokens of `saved` and its pages, so that none of them is computed again.
    ///
    /// # Errors
    /// [`EngineError::Saved`], with [`SavedError::Settings`](lacuna_kv::saved::SavedError::Settings) when another model or other settings computed it.
    pub fn restore_session(
        &self,
        saved: &mut Saved,
        sampling: Sampling,
        path: &Path,
    ) -> Result<Session, EngineError> {
        let fingerprint = self.fingerprint(&folder_of(path));
        let fingerprint = fingerprint.map_err(error::saved(path))?;
        let mut session = self.session(sampling)?;
        let restored = saved.restore(self.kv_cache(), self.context_tokens(), &fingerprint);
        session.sequence = restored.map_err(error::saved(path))?;
        session.tokens.extend_from_slice(&saved.tokens);
        if self.model().spec().images.is_some() {
            session.images = images::computed(&saved.tokens);
        }
        Ok(session)
    }
}

/// Where what is known of weights is remembered.
fn folder_of(path: &Path) -> std::path::PathBuf {
    path.parent().unwrap_or(Path::new(".")).to_path_buf()
}
