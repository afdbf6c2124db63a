//! Experts as Qwen3-VL's mixtures have them: stacked, with columns where products take rows.
//!
//! ```text
//! experts.gate_up_proj [experts, hidden, 2 x inner]   gates, then ups
//! experts.down_proj    [experts, inner, hidden]
//! ```
//!
//! They become the same tensors the other way round.

use serde_json::{Map, Value};

use super::mxfp4::{Matrix, transpose};
use super::part::Part;
use super::{FormError, Table};

/// What the text model of such a folder is called.
const KIND: &str = "qwen3_vl_moe_text";

pub(super) fn read(config: &Map<String, Value>, table: &mut Table<'_>) -> Result<(), FormError> {
    if config.get("model_type").and_then(Value::as_str) != Some(KIND) {
        return Ok(());
    }
    let size = |name: &str| {
        let size = config.get(name).and_then(Value::as_u64);
        size.and_then(|size| usize::try_from(size).ok())
    };
    let [hidden, inner] = ["hidden_size", "moe_intermediate_size"].map(size);
    let both = inner.and_then(|inner| inner.checked_mul(2));
    for (ending, lies) in [
        (".experts.gate_up_proj", [hidden, both]),
        (".experts.down_proj", [inner, hidden]),
    ] {
        for (_, name) in table.ending(ending) {
            let Some(floats) = table.tensors.find(name).map(Part::new) else {
                continue;
            };
            // Some have been turned round by whoever made the folder.
            let [rows, columns] = [lies[1], lies[0]];
            let turned =
                matches!(*floats.shape(), [_, r, c] if [Some(r), Some(c)] == [rows, columns]);
            if turned && rows != columns {
                continue;
            }
            transpose(table, name, floats, &[Matrix::whole(name)])?;
        }
    }
    Ok(())
}
