//! Images that messages show.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use lacuna::{Engine, Message, Prompt, Session};
use lacuna_cli::tell;
use lacuna_engine::{Eyes, ImageHeader, ImageLimits};

use super::conversation_prompt;
use crate::cli::RunArgs;

/// What sees, and what has been seen: an image that is shown again is not encoded again.
pub(super) struct Sight {
    eyes: Eyes,
    /// Whether the model can.
    pub(super) sees: bool,
}

impl Sight {
    pub(super) fn new(engine: &Engine) -> Self {
        Self {
            eyes: Eyes::new(Arc::clone(engine.model()), engine.cpu().config(), None)
                .within(engine.context_tokens()),
            sees: engine.model().images().is_some(),
        }
    }

    /// The image in a file, if it is one.
    pub(super) fn read(&self, path: &Path) -> Result<Vec<u8>> {
        ensure!(self.sees, lacuna_engine::ImageError::NoEyes);
        let file = std::fs::read(path);
        let file = file.with_context(|| format!("cannot read the image {}", path.display()))?;
        let header = ImageHeader::read(&file, &ImageLimits::default())
            .with_context(|| format!("{} cannot be shown", path.display()))?;
        tell!(
            "image: {}, {} x {} pixels",
            path.display(),
            header.width,
            header.height
        );
        Ok(file)
    }

    /// What was said as a prompt whose images the session shows.
    pub(super) fn prompt(
        &self,
        engine: &Engine,
        session: &mut Session,
        (messages, images): (&[Message], &Images),
        args: &RunArgs,
    ) -> Result<Prompt> {
        let mut prompt = conversation_prompt(engine, messages, args)?;
        session.show(self.eyes.show(&mut prompt.tokens, &images.files)?);
        Ok(prompt)
    }
}

/// The images of a conversation.
#[derive(Clone, Default)]
pub(super) struct Images {
    /// In the order of their places.
    files: Vec<Vec<u8>>,
    /// Those at the end that have no place yet: the next message shows them.
    pending: usize,
}

impl Images {
    /// Has the next message show an image.
    pub(super) fn add(&mut self, file: Vec<u8>) {
        self.files.push(file);
        self.pending += 1;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Whether the next message shows some.
    pub(super) fn are_pending(&self) -> bool {
        self.pending > 0
    }

    /// Images that messages show.
    pub(super) fn placed(&self) -> usize {
        self.files.len() - self.pending
    }

    /// Forgets all but the first `placed`, which messages still show.
    pub(super) fn truncate(&mut self, placed: usize) {
        self.files.truncate(placed);
        self.pending = 0;
    }

    /// A message of the text behind the images that were added for it, as chat templates take it.
    pub(super) fn message(&mut self, text: &str) -> Message {
        let mut message = Message::new("user", text);
        if self.pending > 0 {
            let image = serde_json::json!({"type": "image"});
            let text = serde_json::json!({"type": "text", "text": message.content});
            let images = std::iter::repeat_n(image, std::mem::take(&mut self.pending));
            message.content = images.chain([text]).collect();
        }
        message
    }
}
