//! Sizes of a KV cache: rows, bytes per token, and the page size that suits them.

use std::fmt;

use lacuna_kernels::ElementType;
use lacuna_pages::PageSize;

use crate::error::KvError;

/// Index of a decoder block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Layer(pub usize);

/// Which half of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Keys.
    Key,
    /// Values.
    Value,
}

impl Side {
    /// Both, in storage order.
    pub const BOTH: [Self; 2] = [Self::Key, Self::Value];
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key => "K",
            Self::Value => "V",
        })
    }
}

/// Shape of one sequence's KV cache. A row is one token's K (or V) in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Decoder blocks.
    pub layers: usize,
    /// Key/value heads per layer.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Storage of one element.
    pub element: ElementType,
}

impl Geometry {
    /// Rows a page should hold at least, so that the per-page cost of mapping is small beside the
    /// cost of filling the page.
    const MIN_ROWS_PER_PAGE: usize = 16;
    /// Bytes a process can address on the 64-bit systems this runs on.
    const ADDRESS_SPACE: usize = 1 << 47;

    /// Buffers a sequence needs: K and V of every layer.
    #[must_use]
    pub fn buffers(&self) -> usize {
        2 * self.layers
    }

    /// Elements in one row: `kv_heads x head_dim`.
    #[must_use]
    pub fn row_elements(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Bytes of one row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.element.bytes(self.row_elements())
    }

    /// Bytes one token takes over all layers, K and V.
    #[must_use]
    pub fn bytes_per_token(&self) -> usize {
        self.buffers() * self.row_bytes()
    }

    /// Bytes of one buffer that holds `tokens` rows.
    ///
    /// # Errors
    /// [`KvError::ContextTooLarge`] when that is no number of bytes an address space can have.
    pub fn buffer_bytes(&self, tokens: usize) -> Result<usize, KvError> {
        let total = tokens.checked_mul(self.bytes_per_token());
        match total {
            Some(total) if total < Self::ADDRESS_SPACE => Ok(tokens * self.row_bytes()),
            _ => Err(KvError::ContextTooLarge { tokens, bytes_per_token: self.bytes_per_token() }),
        }
    }

    /// The page size to use, of those a device offers: the smallest that holds at least 16 rows
    /// (slack is at most one page per buffer), or the largest there is.
    #[must_use]
    pub fn page_size(&self, offered: &[PageSize]) -> Option<PageSize> {
        let wanted = (Self::MIN_ROWS_PER_PAGE * self.row_bytes()) as u64;
        let fits = offered.iter().copied().filter(|page| page.bytes() >= wanted);
        fits.min_by_key(|page| page.bytes()).or_else(|| offered.iter().copied().max_by_key(|page| page.bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN3_4B: Geometry = Geometry { layers: 36, kv_heads: 8, head_dim: 128, element: ElementType::F16 };

    #[test]
    fn published_sizes_come_out_exactly() {
        assert_eq!(QWEN3_4B.bytes_per_token(), 147_456);
        let dense = QWEN3_4B.buffer_bytes(32_768).unwrap() * QWEN3_4B.buffers();
        assert_eq!(dense, 9 << 29, "4.5 GiB");
        let qwen3_06b = Geometry { layers: 28, element: ElementType::F32, ..QWEN3_4B };
        assert_eq!(qwen3_06b.buffer_bytes(1024).unwrap() * qwen3_06b.buffers(), 234_881_024);
    }

    #[test]
    fn pages_hold_at_least_sixteen_rows() {
        let sizes = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
        let offered = sizes.map(|bytes| PageSize::new(bytes).expect("a power of two"));
        let chosen = |geometry: Geometry| geometry.page_size(&offered).map(PageSize::bytes);
        assert_eq!(chosen(QWEN3_4B), Some(64 << 10), "32 tokens a page");
        let small = Geometry { kv_heads: 2, head_dim: 64, ..QWEN3_4B };
        assert_eq!(chosen(small), Some(4 << 10), "16 tokens a page");
        let wide = Geometry { kv_heads: 128, head_dim: 256, ..QWEN3_4B };
        assert_eq!(chosen(wide), Some(256 << 10), "the largest there is");
        assert_eq!(QWEN3_4B.page_size(&[]), None);
    }

    #[test]
    fn absurd_contexts_are_refused() {
        for tokens in [usize::MAX, usize::MAX / 2048, 1 << 40] {
            assert!(matches!(QWEN3_4B.buffer_bytes(tokens), Err(KvError::ContextTooLarge { .. })));
        }
    }
}
