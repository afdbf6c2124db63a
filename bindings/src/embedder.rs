//! Models that make embeddings of texts.

use std::sync::Arc;

use lacuna::{EmbedderConfig, EncodeLimits, Excess, Model};

use crate::error::LacunaError;
use crate::opening::files;
use crate::settings::EngineSettings;
use crate::waiting::{Owned, apart};

/// A model that makes embeddings, ready to run. Nothing is kept of a text that was embedded.
#[derive(uniffi::Object)]
pub struct Embedder {
    held: Owned<lacuna::Embedder>,
    dimensions: u64,
}

#[uniffi::export]
impl Embedder {
    /// Loads the model at a path, a GGUF file or a Hugging Face folder.
    ///
    /// # Errors
    /// [`LacunaError::Model`], also for a model that makes none; [`LacunaError::BudgetExceeded`];
    /// [`LacunaError::InvalidValue`].
    #[uniffi::constructor(default(settings = None))]
    pub async fn open(
        model: String,
        settings: Option<EngineSettings>,
    ) -> Result<Arc<Self>, LacunaError> {
        apart(move || {
            let config = settings.unwrap_or_else(EngineSettings::usual).config()?;
            let config = EmbedderConfig {
                batch_tokens: EmbedderConfig::default().batch_tokens,
                ..EmbedderConfig::of(&config.engine)
            };
            let model = Arc::new(Model::load(files(&model)?)?);
            let embedder = lacuna::Embedder::new(model, &config)?;
            Ok(Arc::new(Self {
                dimensions: embedder.dimensions() as u64,
                held: Owned::new("lacuna-embedder", embedder)?,
            }))
        })
        .await
    }

    /// Elements of an embedding.
    #[must_use]
    pub fn dimensions(&self) -> u64 {
        self.dimensions
    }

    /// An embedding of each text, in their order. Texts that are longer than the model takes are cut.
    ///
    /// # Errors
    /// [`LacunaError::BudgetExceeded`] for a text that takes more memory than there is.
    pub async fn embed(&self, texts: Vec<String>) -> Result<Vec<Vec<f32>>, LacunaError> {
        let embed = move |embedder: &mut lacuna::Embedder| {
            let encoder = embedder.encoder();
            let tokens = texts
                .iter()
                .map(|text| encoder.text(text, Excess::Cut, &EncodeLimits::default()));
            let tokens = tokens.collect::<Result<Vec<_>, _>>()?;
            let mut vectors = Vec::with_capacity(tokens.len());
            embedder.embed(&tokens, |vector| vectors.push(vector.to_vec()))?;
            Ok(vectors)
        };
        self.held.with(embed).await
    }
}
