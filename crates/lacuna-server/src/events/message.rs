//! Events as vLLM writes them: MessagePack, a list for a batch and a map for each event.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use lacuna_kv::prefix::{Block, BlockHash, Medium};
use serde::Serialize;

/// What routers call a medium. The memory that prompts are computed from is `GPU` to them, whatever it is made of.
fn name_of(medium: Medium) -> &'static str {
    match medium {
        Medium::Memory => "GPU",
        Medium::Disk => "DISK",
    }
}

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
    /// Events for `blocks`, each of which comes after its parent; one for as many of a medium as follow each other.
    pub(super) fn stored(blocks: &[(Medium, Arc<Block>)]) -> Vec<Self> {
        let follows = |(one_medium, one): &(Medium, Arc<Block>),
                       (medium, next): &(Medium, Arc<Block>)| {
            one_medium == medium && next.parent == Some(one.hash)
        };
        let event = |run: &[(Medium, Arc<Block>)]| Self::BlockStored {
            block_hashes: run.iter().map(|(_, block)| block.hash.0).collect(),
            parent_block_hash: run[0].1.parent.map(|parent| parent.0),
            token_ids: run.iter().flat_map(|(_, block)| block.tokens).collect(),
            block_size: Block::TOKENS,
            lora_id: None,
            medium: name_of(run[0].0),
            lora_name: None,
        };
        blocks.chunk_by(follows).map(event).collect()
    }

    /// Events for blocks that are removed, one for as many of a medium as stand together.
    pub(super) fn removed(blocks: &[(Medium, BlockHash)]) -> Vec<Self> {
        let event = |run: &[(Medium, BlockHash)]| Self::BlockRemoved {
            block_hashes: run.iter().map(|(_, hash)| hash.0).collect(),
            medium: name_of(run[0].0),
        };
        let runs = blocks.chunk_by(|(one, _), (next, _)| one == next);
        runs.map(event).collect()
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
