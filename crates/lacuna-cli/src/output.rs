//! What a command leaves on the terminal: results on standard output, everything else on standard
//! error, and an exit code of 2 for arguments that make no sense and 1 for what went wrong.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use lacuna_engine::EngineError;
use lacuna_models::plan::PlanError;
use lacuna_server::StartError;
use serde::Serialize;

/// Arguments that cannot be carried out whatever the files say.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// Prints one JSON object and a line feed on standard output.
pub fn json(value: &impl Serialize) -> Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, value)?;
    writeln!(out)?;
    Ok(())
}

/// Prints `error` with its causes and says how the process should exit.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if error
        .downcast_ref::<io::Error>()
        .is_some_and(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
    {
        return ExitCode::SUCCESS;
    }
    eprintln!("error: {error:#}");
    ExitCode::from(if is_usage(error) { 2 } else { 1 })
}

fn is_usage(error: &anyhow::Error) -> bool {
    let engine = match error.downcast_ref() {
        Some(StartError::OpenToAll { .. }) => return true,
        Some(StartError::Engine(error)) => Some(error),
        _ => error.downcast_ref(),
    };
    error.downcast_ref::<Usage>().is_some()
        || matches!(
            engine,
            Some(
                EngineError::TooManyThreads { .. }
                    | EngineError::Plan(PlanError::EmptyContext | PlanError::EmptyBatch)
                    | EngineError::Sampling(_)
            )
        )
}

/// `bytes` in the largest binary unit that leaves at least one whole.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = (bytes.max(1).ilog2() / 10).min(4);
    let value = bytes as f64 / f64::from(1u32 << 10).powi(power.cast_signed());
    let digits = if power == 0 || value >= 100.0 { 0 } else { 1 };
    format!("{value:.digits$} {}", UNITS[power as usize])
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn bytes_are_readable() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(117_440_512), "112 MiB");
        assert_eq!(bytes(9 << 29), "4.5 GiB");
    }
}
