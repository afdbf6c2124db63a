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
    /// Storage of one element of K.
    pub key_element: ElementType,
    /// Storage of one element of V.
    pub value_element: ElementType,
}

impl Geometry {
    /// Rows a page should hold at least, so that the per-page cost of mapping is small beside the
    /// cost of filling the page.
    pub(crate) const MIN_ROWS_PER_PAGE: usize = 16;
    /// Bytes a process can address on the 64-bit systems this runs on.
    const ADDRESS_SPACE: usize = 1 << 47;

    /// Checks that there is something to hold and that sizes fit the address space; every other
    /// method may be called once it has succeeded.
    ///
    /// # Errors
    /// [`KvError::EmptyGeometry`], [`KvError::HeadDim`] when a head is no whole number of an element
    /// type's blocks, or [`KvError::ContextTooLarge`] for a token that fills the address space by
    /// itself.
    pub fn validate(&self) -> Result<(), KvError> {
        let Self {
            layers,
            kv_heads,
            head_dim,
            ..
        } = *self;
        if layers == 0 || kv_heads == 0 || head_dim == 0 {
            return Err(KvError::EmptyGeometry {
                layers,
                kv_heads,
                head_dim,
            });
        }
        for side in Side::BOTH {
            self.element(side).check_head_dim(head_dim)?;
        }
        let elements = [2, layers, kv_heads, head_dim]
            .into_iter()
            .try_fold(1usize, usize::checked_mul);
        // No element is larger than four bytes.
        match elements.and_then(|elements| elements.checked_mul(4)) {
            Some(bytes) if bytes < Self::ADDRESS_SPACE => Ok(()),
            _ => Err(KvError::ContextTooLarge {
                tokens: 1,
                bytes_per_token: elements.unwrap_or(usize::MAX),
                limit: Self::ADDRESS_SPACE,
            }),
        }
    }

    /// Storage of one element of `side`.
    #[must_use]
    pub fn element(&self, side: Side) -> ElementType {
        match side {
            Side::Key => self.key_element,
            Side::Value => self.value_element,
        }
    }

    /// Elements in one row: `kv_heads x head_dim`.
    #[must_use]
    pub fn row_elements(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Bytes of one head of one row.
    #[must_use]
    pub fn head_bytes(&self, side: Side) -> usize {
        self.element(side).bytes(self.head_dim)
    }

    /// Bytes of one row.
    #[must_use]
    pub fn row_bytes(&self, side: Side) -> usize {
        self.kv_heads * self.head_bytes(side)
    }

    /// Bytes one token takes over all layers, K and V.
    #[must_use]
    pub fn bytes_per_token(&self) -> usize {
        self.layers
            * Side::BOTH
                .map(|side| self.row_bytes(side))
                .iter()
                .sum::<usize>()
    }

    /// Bytes of `tokens` tokens over all layers, K and V.
    ///
    /// # Errors
    /// [`KvError::ContextTooLarge`] when that is no number of bytes an address space can have.
    pub fn bytes(&self, tokens: usize) -> Result<usize, KvError> {
        match tokens.checked_mul(self.bytes_per_token()) {
            Some(total) if total < Self::ADDRESS_SPACE => Ok(total),
            _ => Err(KvError::ContextTooLarge {
                tokens,
                bytes_per_token: self.bytes_per_token(),
                limit: Self::ADDRESS_SPACE,
            }),
        }
    }

    /// The page size to use, of those a device offers, when rows of `layers_together` layers lie side
    /// by side: the smallest that holds at least 16 of those (slack is at most one page per buffer),
    /// or the largest there is.
    #[must_use]
    pub fn page_size(&self, offered: &[PageSize], layers_together: usize) -> Option<PageSize> {
        let row = self.row_bytes(Side::Key).max(self.row_bytes(Side::Value));
        let wanted = (Self::MIN_ROWS_PER_PAGE * row * layers_together) as u64;
        let fits = offered
            .iter()
            .copied()
            .filter(|page| page.bytes() >= wanted);
        fits.min_by_key(|page| page.bytes())
            .or_else(|| offered.iter().copied().max_by_key(|page| page.bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN3_4B: Geometry = Geometry {
        layers: 36,
        kv_heads: 8,
        head_dim: 128,
        key_element: ElementType::F16,
        value_element: ElementType::F16,
    };

    #[test]
    fn published_sizes_come_out_exactly() {
        assert_eq!(QWEN3_4B.bytes_per_token(), 147_456);
        assert_eq!(QWEN3_4B.bytes(32_768).unwrap(), 9 << 29, "4.5 GiB");
        let qwen3_06b = Geometry {
            layers: 28,
            key_element: ElementType::F32,
            value_element: ElementType::F32,
            ..QWEN3_4B
        };
        assert_eq!(qwen3_06b.bytes(1024).unwrap(), 234_881_024);
    }

    #[test]
    fn keys_and_values_are_sized_each_by_their_own_element() {
        let mixed = Geometry {
            key_element: ElementType::F32,
            ..QWEN3_4B
        };
        assert_eq!(mixed.row_bytes(Side::Key), 4096);
        assert_eq!(mixed.row_bytes(Side::Value), 2048);
        assert_eq!(mixed.bytes_per_token(), 36 * (4096 + 2048));
    }

    #[test]
    fn heads_that_are_no_whole_blocks_are_refused() {
        let odd = Geometry {
            head_dim: 80,
            value_element: ElementType::Q8_0,
            ..QWEN3_4B
        };
        let error = odd.validate().unwrap_err();
        assert!(matches!(error, KvError::HeadDim(_)), "{error}");
        let quantized = Geometry {
            value_element: ElementType::Q8_0,
            ..QWEN3_4B
        };
        assert!(quantized.validate().is_ok());
        assert_eq!(quantized.row_bytes(Side::Value), 8 * 4 * 34);
    }

    #[test]
    fn pages_hold_at_least_sixteen_rows() {
        let sizes = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
        let offered = sizes.map(|bytes| PageSize::new(bytes).expect("a power of two"));
        let chosen =
            |geometry: Geometry, layers| geometry.page_size(&offered, layers).map(PageSize::bytes);
        assert_eq!(chosen(QWEN3_4B, 1), Some(64 << 10), "32 tokens a page");
        assert_eq!(
            chosen(QWEN3_4B, 4),
            Some(256 << 10),
            "32 tokens of four layers"
        );
        let small = Geometry {
            kv_heads: 2,
            head_dim: 64,
            ..QWEN3_4B
        };
        assert_eq!(chosen(small, 1), Some(4 << 10), "16 tokens a page");
        let wide = Geometry {
            kv_heads: 128,
            head_dim: 256,
            ..QWEN3_4B
        };
        assert_eq!(chosen(wide, 1), Some(256 << 10), "the largest there is");
        assert_eq!(QWEN3_4B.page_size(&[], 1), None);
    }

    #[test]
    fn a_context_of_the_whole_address_space_is_one_token_too_long() {
        let token = Geometry {
            layers: 1,
            kv_heads: 1,
            head_dim: 2,
            key_element: ElementType::F32,
            value_element: ElementType::F32,
        };
        assert_eq!(token.bytes_per_token(), 16);
        let tokens = Geometry::ADDRESS_SPACE / 16;
        assert_eq!(
            token.bytes(tokens - 1).unwrap(),
            Geometry::ADDRESS_SPACE - 16
        );
        let Err(KvError::ContextTooLarge {
            bytes_per_token,
            limit,
            ..
        }) = token.bytes(tokens)
        else {
            panic!("{tokens} tokens fit");
        };
        assert_eq!((bytes_per_token, limit), (16, Geometry::ADDRESS_SPACE));
    }

    #[test]
    fn sides_are_called_k_and_v() {
        assert_eq!(Side::BOTH.map(|side| side.to_string()), ["K", "V"]);
    }

    #[test]
    fn absurd_contexts_are_refused() {
        for tokens in [usize::MAX, usize::MAX / 2048, 1 << 40] {
            assert!(matches!(
                QWEN3_4B.bytes(tokens),
                Err(KvError::ContextTooLarge { .. })
            ));
        }
    }

    #[test]
    fn shapes_with_nothing_in_them_or_past_the_address_space_are_refused() {
        for empty in [
            Geometry {
                layers: 0,
                ..QWEN3_4B
            },
            Geometry {
                kv_heads: 0,
                ..QWEN3_4B
            },
            Geometry {
                head_dim: 0,
                ..QWEN3_4B
            },
        ] {
            assert!(matches!(
                empty.validate(),
                Err(KvError::EmptyGeometry { .. })
            ));
        }
        let most = |head_dim| Geometry {
            layers: 1 << 20,
            kv_heads: 1 << 10,
            head_dim,
            ..QWEN3_4B
        };
        assert!(most((1 << 14) - 1).validate().is_ok());
        // Of the last, K and V of elements of four bytes are exactly the address space.
        for (layers, head_dim) in [(usize::MAX, 128), (1 << 20, 1 << 40), (1 << 27, 1 << 14)] {
            let absurd = Geometry {
                layers,
                head_dim,
                ..QWEN3_4B
            };
            assert!(matches!(
                absurd.validate(),
                Err(KvError::ContextTooLarge { .. })
            ));
        }
    }
}
