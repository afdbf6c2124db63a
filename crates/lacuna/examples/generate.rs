//! Text from the demo model, piece by piece: `cargo run --release --example generate -- "What is a trait?"`

use std::error::Error;
use std::io::Write;
use std::sync::Arc;

use lacuna::{Engine, EngineConfig, Generation, Limits, Message, Model, Sampling};

fn main() -> Result<(), Box<dyn Error>> {
    let question = std::env::args().nth(1);
    let question = question.as_deref().unwrap_or("What is ownership?");
    let model = Arc::new(Model::load(lacuna::demo())?);
    let mut engine = Engine::new(model, &EngineConfig::default())?;
    let mut session = engine.session(Sampling::greedy())?;
    session.extend(&engine.model().prompt(&[Message::new("user", question)])?);
    let limits = Limits {
        max_tokens: Some(48),
        ..Limits::default()
    };
    let mut out = std::io::stdout().lock();
    let mut generation = Generation::new(&mut engine, &mut session, limits)?;
    while let Some(piece) = generation.next_piece()? {
        out.write_all(piece.as_bytes())?;
        out.flush()?;
    }
    let kv = generation.session().kv();
    writeln!(
        out,
        "\n{} of KV cache for {} tokens; held whole it would be {}",
        kv.committed_bytes,
        generation.session().tokens().len(),
        kv.dense_bytes
    )?;
    Ok(())
}
