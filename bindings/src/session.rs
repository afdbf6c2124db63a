//! Sessions: texts that their owner goes on with, forks, cuts back and keeps.

use std::path::PathBuf;
use std::sync::Arc;

use lacuna::{AddSpecial, Continuation, Handle, ServiceSession, SpecialText};

use crate::engine::{Engine, tokenize};
use crate::error::LacunaError;
use crate::settings::TextSettings;
use crate::waiting::Owned;

/// A text that the app goes on with itself. Its pages stay until it is dropped.
#[derive(uniffi::Object)]
pub struct Session {
    held: Owned<Held>,
    engine: Arc<Engine>,
}

struct Held {
    session: ServiceSession,
    /// How it goes on, once it has begun to.
    how: Option<Continuation>,
}

impl Session {
    pub(crate) fn new(session: ServiceSession, engine: Arc<Engine>) -> Result<Self, LacunaError> {
        let held = Held { session, how: None };
        let held = Owned::new("lacuna-session", held)?;
        Ok(Self { held, engine })
    }
}

#[uniffi::export]
impl Session {
    /// Appends a text, to be computed when the session goes on. At its beginning it gets what the vocabulary puts there.
    ///
    /// # Errors
    /// [`LacunaError::ContextTooLong`]; the session is unchanged then.
    pub async fn append(&self, text: String) -> Result<(), LacunaError> {
        let engine = Arc::clone(&self.engine);
        let append = move |held: &mut Held| {
            let empty = held.session.tokens().is_empty();
            let add = if empty {
                AddSpecial::Yes
            } else {
                AddSpecial::No
            };
            let tokens = tokenize(engine.handle(), &text, add)?;
            held.extend(engine.handle(), &tokens)
        };
        self.held.with(append).await
    }

    /// Appends tokens.
    ///
    /// # Errors
    /// [`LacunaError::ContextTooLong`]; [`LacunaError::InvalidValue`] for a token that is none. The session is unchanged
    /// then.
    pub async fn append_tokens(&self, tokens: Vec<u32>) -> Result<(), LacunaError> {
        let engine = Arc::clone(&self.engine);
        let append = move |held: &mut Held| held.extend(engine.handle(), &tokens);
        self.held.with(append).await
    }

    /// Every token so far.
    ///
    /// # Errors
    /// [`LacunaError::Closed`].
    pub async fn tokens(&self) -> Result<Vec<u32>, LacunaError> {
        let tokens = |held: &mut Held| Ok(held.session.tokens().to_vec());
        self.held.with(tokens).await
    }

    /// Begins to go on after its tokens: `next` has the pieces.
    ///
    /// # Errors
    /// [`LacunaError::InvalidValue`] when there is nothing to go on after, and for settings.
    #[uniffi::method(default(settings = None))]
    pub async fn begin(&self, settings: Option<TextSettings>) -> Result<(), LacunaError> {
        let engine = Arc::clone(&self.engine);
        let begin = move |held: &mut Held| {
            let settings = settings.unwrap_or_default();
            let sampling = settings.sampling(engine.handle().model());
            let limits = settings.limits(SpecialText::default());
            held.how = Some(held.session.begin(sampling, &limits)?);
            Ok(())
        };
        self.held.with(begin).await
    }

    /// The next piece of text; none after the last. Nothing is computed that is not asked for.
    ///
    /// # Errors
    /// [`LacunaError::BudgetExceeded`] when there is no memory: the session is as it was, and goes on when there is.
    pub async fn next(&self) -> Result<Option<String>, LacunaError> {
        self.held.with(Held::next).await
    }

    /// Keeps the first tokens, and gives the pages of the others back.
    ///
    /// # Errors
    /// [`LacunaError::Closed`].
    pub async fn truncate(&self, tokens: u64) -> Result<(), LacunaError> {
        let truncate = move |held: &mut Held| {
            held.how = None;
            held.session.truncate(tokens as usize)?;
            Ok(())
        };
        self.held.with(truncate).await
    }

    /// Another session of the same tokens, over the same pages.
    ///
    /// # Errors
    /// [`LacunaError::BudgetExceeded`].
    pub async fn fork(&self) -> Result<Arc<Self>, LacunaError> {
        let fork = self.held.with(|held| Ok(held.session.fork()?)).await?;
        Self::new(fork, Arc::clone(&self.engine)).map(Arc::new)
    }

    /// Writes it to a file, from which `Engine.loadSession` has it. What was there stays if that fails.
    ///
    /// # Errors
    /// [`LacunaError::SavedSession`].
    pub async fn save(&self, path: String) -> Result<(), LacunaError> {
        let save = move |held: &mut Held| Ok(held.session.save("", &PathBuf::from(path))?);
        self.held.with(save).await
    }
}

impl Held {
    fn extend(&mut self, handle: &Handle, tokens: &[u32]) -> Result<(), LacunaError> {
        let (vocabulary, context) = (handle.model().spec().vocabulary, handle.context_tokens());
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(LacunaError::value(format_args!(
                "token {token} is out of range: the vocabulary has {vocabulary} tokens"
            )));
        }
        let length = self.session.tokens().len() + tokens.len();
        if length > context {
            return Err(LacunaError::context(format_args!(
                "the session would have {length} tokens, but the context holds {context}"
            )));
        }
        self.how = None;
        self.session.extend(tokens);
        Ok(())
    }

    /// Steps until there is something to show.
    fn next(&mut self) -> Result<Option<String>, LacunaError> {
        let Some(how) = &mut self.how else {
            return Ok(None);
        };
        while let Some(piece) = self.session.advance(how)? {
            if !piece.text.is_empty() {
                return Ok(Some(piece.text));
            }
        }
        self.how = None;
        Ok(None)
    }
}
