//! Lacuna for Swift, Kotlin and other languages: a model in the app's own process, under one byte budget that the app
//! lowers when the system asks for memory.
//!
//! Everything that waits is asynchronous in the language's own way (`async` in Swift, `suspend` in Kotlin), and needs
//! no runtime. What is dropped is cancelled.

mod embedder;
mod engine;
mod error;
mod opening;
mod session;
mod settings;
mod text;
mod waiting;

pub use embedder::Embedder;
pub use engine::{Chat, Engine, Memory, Role};
pub use error::LacunaError;
pub use opening::{LoadProgress, Needs, needs};
pub use session::Session;
pub use settings::{EngineSettings, TextSettings};
pub use text::{FinishReason, Piece, TextStream, Usage};

uniffi::setup_scaffolding!("lacuna");
