//! Events as vLLM writes them: MessagePack, a list for a batch and a map for each event.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use lacuna_kv::prefix::{Block, BlockHash};
use serde::Serialize;

/// What routers call the memory that prompts are computed from, whatever it is made of.
const MEDIUM: &str = "GPU";

/// One event.
#[derive(Debug, Serialize)]
#[serde(tag = "type")]
pub(super) enum Event {
    /// Blocks that follow each other, the first after `parent_block_hash`.
    BlockStored {
        block_hashes: Vec<u64>,
        parent_block_hash: Option<u64>,
        token_ids: Vec<u32>,
        block_size: usize,
        lora_id: Option<u64>,
        medium: &'static str,
        lora_name: Option<&'static str>,
    },
    BlockRemoved {
        block_hashes: Vec<u64>,
        medium: &'static str,
    },
    AllBlocksCleared {},
}

impl Event {
    /// Events for `blocks`, each of which comes after its parent; one for as many as follow each other.
    pub(super) fn stored(blocks: &[Arc<Block>]) -> Vec<Self> {
        let runs = blocks.chunk_by(|one, next| next.parent == Some(one.hash));
        let event = |run: &[Arc<Block>]| Self::BlockStored {
            block_hashes: run.iter().map(|block| block.hash.0).collect(),
            parent_block_hash: run[0].parent.map(|parent| parent.0),
            token_ids: run.iter().flat_map(|block| block.tokens).collect(),
            block_size: Block::TOKENS,
            lora_id: None,
            medium: MEDIUM,
            lora_name: None,
        };
        runs.map(event).collect()
    }

    pub(super) fn removed(hashes: &[BlockHash]) -> Self {
        Self::BlockRemoved {
            block_hashes: hashes.iter().map(|hash| hash.0).collect(),
            medium: MEDIUM,
        }
    }
}

/// A batch of events of one engine that computes alone.
pub(super) fn batch(events: &[Event]) -> Vec<u8> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = since.map_or(0.0, |since| since.as_secs_f64());
    let data_parallel_rank = 0;
    // Lists, numbers and maps with names for keys, in memory: there is nothing that could be refused.
    rmp_serde::to_vec_named(&(seconds, events, data_parallel_rank)).unwrap_or_default()
}
