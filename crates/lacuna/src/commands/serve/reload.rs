//! What is read again while the server runs: whoever renews certificates or renames logs sends SIGHUP.

use anyhow::{Context, Result};
use lacuna_cli::tell;
use lacuna_server::{AccessLog, ServerConfig, Signals, Tls};

/// The files of a server that can be replaced while it runs.
#[derive(Debug)]
pub(super) struct Reload {
    tls: Option<Tls>,
    log: Option<AccessLog>,
}

impl Reload {
    pub(super) fn of(config: &ServerConfig) -> Self {
        Self {
            tls: config.tls.clone(),
            log: config.access_log.clone(),
        }
    }

    /// Listens to what asks the process to end, and to SIGHUP where there is something to read again.
    pub(super) fn listen(&self) -> Result<Signals> {
        let signals = Signals::listen();
        let signals = match self.tls.is_some() || self.log.is_some() {
            true => signals.and_then(Signals::with_reload),
            false => signals,
        };
        signals.context("cannot listen for signals")
    }

    /// Waits for the end. What cannot be read again stays as it was, and whoever runs the server is told.
    pub(super) fn wait(&self, signals: &Signals) {
        signals.wait_and_reload(|| {
            match self.tls.as_ref().map(Tls::reload) {
                Some(Ok(())) => tell!("the certificate was read again"),
                Some(Err(error)) => {
                    tell!("error: {error}; the certificate from before stays in use")
                }
                None => {}
            }
            if let Some(Err(error)) = self.log.as_ref().map(AccessLog::reopen) {
                tell!("error: cannot open the access log again: {error}");
            }
        });
    }
}
