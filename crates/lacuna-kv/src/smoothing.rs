//! What keys are changed by before they are stored in few bits.

use std::fmt;
use std::sync::Arc;

use crate::geometry::Layer;

/// How the keys of each layer are stored smoothed: `(key - centre) * factor`, element by element, with queries that are
/// divided by the same factors.
///
/// A dot product with a query is then that of before less one number, the same for every row, so weights of attention stay as
/// they are. What is left of a key is smaller, and rounding it is felt less where queries are large. Cloning is cheap.
#[derive(Clone, PartialEq, Eq)]
pub struct KeySmoothing {
    layers: Arc<[Option<SmoothedKeys>]>,
}

/// The same of one layer: `[kv_heads, key_dim]` each.
#[derive(Debug, Clone)]
pub struct SmoothedKeys {
    centre: Vec<f32>,
    factors: Vec<f32>,
    inverse: Vec<f32>,
}

impl SmoothedKeys {
    /// Keys of `centre.len()` elements over all heads.
    ///
    /// # Panics
    /// When there is not one factor for each element, or one is not finite and larger than zero.
    #[must_use]
    pub fn new(centre: Vec<f32>, factors: Vec<f32>) -> Self {
        assert_eq!(centre.len(), factors.len(), "a factor for each element");
        let inverse: Vec<f32> = factors.iter().map(|factor| 1.0 / factor).collect();
        let usable = |x: &f32| x.is_finite() && *x > 0.0;
        assert!(
            factors.iter().all(usable)
                && inverse.iter().all(usable)
                && centre.iter().all(|x| x.is_finite()),
            "keys can be taken back"
        );
        Self {
            centre,
            factors,
            inverse,
        }
    }

    /// What is subtracted from keys.
    #[must_use]
    pub fn centre(&self) -> &[f32] {
        &self.centre
    }

    /// What keys are multiplied by then.
    #[must_use]
    pub fn factors(&self) -> &[f32] {
        &self.factors
    }

    /// What queries are multiplied by.
    #[must_use]
    pub fn inverse(&self) -> &[f32] {
        &self.inverse
    }

    /// What makes one smoothing another.
    fn bits(&self) -> impl Iterator<Item = u32> {
        let numbers = self.centre.iter().chain(&self.factors);
        numbers.map(|number| number.to_bits())
    }
}

impl PartialEq for SmoothedKeys {
    fn eq(&self, other: &Self) -> bool {
        self.bits().eq(other.bits())
    }
}

impl Eq for SmoothedKeys {}

impl KeySmoothing {
    /// That of each layer in turn; `None` where keys are stored as they are, or there are none.
    #[must_use]
    pub fn new(layers: Vec<Option<SmoothedKeys>>) -> Self {
        Self {
            layers: layers.into(),
        }
    }

    /// That of the rows of `layer`.
    #[must_use]
    pub fn layer(&self, layer: Layer) -> Option<&SmoothedKeys> {
        self.layers.get(layer.0)?.as_ref()
    }

    /// The layers whose keys are smoothed.
    pub(crate) fn layers(&self) -> impl Iterator<Item = (Layer, &SmoothedKeys)> {
        let layers = self.layers.iter().enumerate();
        layers.filter_map(|(layer, keys)| Some((Layer(layer), keys.as_ref()?)))
    }
}

impl fmt::Debug for KeySmoothing {
    /// Part of what files of sessions say of their rows: rows can be read by who smooths keys to the same bits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut hasher = blake3::Hasher::new();
        for (Layer(layer), keys) in self.layers() {
            hasher.update(&(layer as u64).to_le_bytes());
            for bits in keys.bits() {
                hasher.update(&bits.to_le_bytes());
            }
        }
        write!(f, "{}", hasher.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(centre: f32, factor: f32) -> SmoothedKeys {
        SmoothedKeys::new(vec![centre; 2], vec![factor; 2])
    }

    #[test]
    fn what_differs_in_a_bit_or_a_layer_has_another_name() {
        let of = |layers: Vec<Option<SmoothedKeys>>| KeySmoothing::new(layers);
        let all = [
            of(vec![Some(keys(1.0, 2.0)), None]),
            of(vec![None, Some(keys(1.0, 2.0))]),
            of(vec![Some(keys(1.0, 2.0_f32.next_up())), None]),
            of(vec![Some(keys(-1.0, 2.0)), None]),
            of(vec![None, None]),
        ];
        for (index, one) in all.iter().enumerate() {
            for (other_index, other) in all.iter().enumerate() {
                let same = index == other_index;
                assert_eq!(one == other, same);
                assert_eq!(format!("{one:?}") == format!("{other:?}"), same);
            }
        }
        assert_eq!(
            all[0].layer(Layer(0)).map(|keys| keys.inverse()[1]),
            Some(0.5)
        );
        assert!(all[0].layer(Layer(1)).is_none() && all[0].layer(Layer(9)).is_none());
    }

    #[test]
    #[should_panic(expected = "taken back")]
    fn factors_that_cannot_be_undone_are_refused() {
        let _ = keys(0.0, f32::MIN_POSITIVE / 8.0);
    }
}
