//! Rendering within bounds.

use std::io;

use minijinja::{Error, Output, State, Template, Value};

use super::{MAX_OUTPUT_BYTES, TemplateError, failed};

/// Renders into memory up to the output limit.
pub(super) fn render(template: &Template, variables: Value) -> Result<String, TemplateError> {
    let mut sink = Sink(Vec::new());
    match template.render_captured_to(variables, &mut sink) {
        Ok(_) => String::from_utf8(sink.0).map_err(|error| TemplateError::Failed {
            detail: error.to_string(),
        }),
        Err(error) => Err(failed(&error)),
    }
}

struct Sink(Vec<u8>);

impl io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > MAX_OUTPUT_BYTES - self.0.len() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes one value.
pub(super) fn write_value(output: &mut Output, _: &mut State, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => output.write_str(text)?,
        None => write!(output, "{value}")?,
    }
    Ok(())
}
