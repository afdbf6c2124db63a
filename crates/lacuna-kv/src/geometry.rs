//! What each layer of a model keeps for later tokens, and the sizes that follow: rows, bytes per
//! token, states.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use lacuna_kernels::ElementType;
use lacuna_pages::device::Location;

use crate::elements::KvElements;
use crate::error::KvError;
use crate::smoothing::{KeySmoothing, SmoothedKeys};

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

    /// This side's of a pair in storage order.
    pub fn of<T>(self, [key, value]: [T; 2]) -> T {
        match self {
            Self::Key => key,
            Self::Value => value,
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key => "K",
            Self::Value => "V",
        })
    }
}

/// What a decoder block keeps for later tokens, a state aside ([`Geometry::with_states`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerCache {
    /// Rows of its own, one of K and one of V for each token, or one that is both.
    Rows(RowSpec),
    /// Nothing of its own: it reads the rows of another, earlier layer.
    Of(Layer),
    /// Nothing.
    None,
}

/// The rows of one layer. A row is one token's K (or V).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowSpec {
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head of K.
    pub key_dim: usize,
    /// Elements of one head of V.
    pub value_dim: usize,
    /// Where V is.
    pub values: ValueRows,
    /// How long a row is of use.
    pub keep: Keep,
}

/// Where the rows of V are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ValueRows {
    /// Stored beside those of K.
    Apart,
    /// The first elements of each head of K, in the storage of K: nothing is stored twice. Latent
    /// attention (DeepSeek).
    InKeys,
}

/// How long a layer's rows are of use.
///
/// A window of `n` means what the reference implementations mean by it: `n` rows, the query's own
/// included. Before the next position `n - 1` rows are of use, and none of them before that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keep {
    /// As long as the sequence.
    All,
    /// Until the window has passed: a query sees this many rows at most, its own the last of them.
    Window(NonZeroUsize),
}

impl Keep {
    /// The first row that a query at `position`, or any after it, sees.
    #[must_use]
    pub fn first_seen(self, position: usize) -> usize {
        match self {
            Self::All => 0,
            Self::Window(window) => (position + 1).saturating_sub(window.get()),
        }
    }
}

impl RowSpec {
    /// Elements of one head of `side`.
    #[must_use]
    pub fn head_dim(&self, side: Side) -> usize {
        match side {
            Side::Key => self.key_dim,
            Side::Value => self.value_dim,
        }
    }

    /// The sides that take memory.
    #[must_use]
    pub fn stored_sides(&self) -> &'static [Side] {
        match self.values {
            ValueRows::Apart => &Side::BOTH,
            ValueRows::InKeys => &[Side::Key],
        }
    }

    /// The side whose memory `side` is read from.
    pub(crate) fn stored_in(&self, side: Side) -> Side {
        match self.values {
            ValueRows::Apart => side,
            ValueRows::InKeys => Side::Key,
        }
    }

    /// Elements in one row of `side`.
    #[must_use]
    pub fn row_elements(&self, side: Side) -> usize {
        self.kv_heads * self.head_dim(side)
    }
}

/// Shape of one sequence's KV cache: what each layer keeps, and how elements are stored. Cloning is
/// cheap.
#[derive(Clone, PartialEq, Eq)]
pub struct Geometry {
    layers: Arc<[LayerCache]>,
    /// Elements of each layer's state; nothing at all where no layer keeps one.
    states: Arc<[usize]>,
    /// Elements for each token of what each layer's state is changed by; nothing where that is not known.
    state_inputs: Arc<[usize]>,
    elements: KvElements,
    /// So many first layers are the host's, where a device computes the others.
    host_layers: usize,
    /// What keys are changed by before they are stored; `None` where they are stored as they are.
    smoothing: Option<KeySmoothing>,
}

impl fmt::Debug for Geometry {
    /// Part of what files of sessions say of their rows: what most geometries do not have is not named.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut named = f.debug_struct("Geometry");
        named
            .field("layers", &self.layers)
            .field("states", &self.states)
            .field("state_inputs", &self.state_inputs)
            .field("elements", &self.elements);
        if self.host_layers > 0 {
            named.field("host_layers", &self.host_layers);
        }
        if let Some(smoothing) = &self.smoothing {
            named.field("smoothing", smoothing);
        }
        named.finish()
    }
}

impl Geometry {
    /// States begin on this boundary: that of the widest vectors.
    const STATE_ALIGNMENT: usize = 64;

    /// Tokens of a step that can go back to its first, at most.
    pub const MOST_REWOUND_TOKENS: usize = 1024;

    /// Bytes a process can address on the 64-bit systems this runs on.
    const ADDRESS_SPACE: usize = 1 << 47;

    /// `layers` layers of the same shape that keep all rows. Nothing is checked here; whatever makes
    /// use of a geometry does.
    #[must_use]
    pub fn uniform(layers: usize, kv_heads: usize, head_dim: usize, elements: KvElements) -> Self {
        let rows = RowSpec {
            kv_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            values: ValueRows::Apart,
            keep: Keep::All,
        };
        Self {
            layers: std::iter::repeat_n(LayerCache::Rows(rows), layers).collect(),
            states: Arc::default(),
            state_inputs: Arc::default(),
            elements,
            host_layers: 0,
            smoothing: None,
        }
    }

    /// What `layers` keep, from the first decoder block on, before states are added.
    ///
    /// # Errors
    /// As [`Geometry::validate`], but for no layer that keeps anything.
    pub fn new(layers: Vec<LayerCache>, elements: KvElements) -> Result<Self, KvError> {
        let geometry = Self {
            layers: layers.into(),
            states: Arc::default(),
            state_inputs: Arc::default(),
            elements,
            host_layers: 0,
            smoothing: None,
        };
        geometry.check_layers()?;
        Ok(geometry)
    }

    /// The same layers, each of which also keeps a state of so many f32 elements; none for 0. What is in
    /// a state is the layer's own affair, and what changes it is not known yet.
    ///
    /// # Errors
    /// [`KvError::States`] unless there is a number for every layer, [`KvError::StatesTooLarge`], and as
    /// [`Geometry::validate`].
    pub fn with_states(self, states: Vec<usize>) -> Result<Self, KvError> {
        let layers = self.layers.len();
        if states.len() != layers {
            let states = states.len();
            return Err(KvError::States { layers, states });
        }
        let bytes = |sum: usize, &elements: &usize| {
            let bytes = elements.checked_mul(size_of::<f32>())?;
            sum.checked_add(bytes)?.checked_add(Self::STATE_ALIGNMENT)
        };
        match states.iter().try_fold(0, bytes) {
            Some(bytes) if bytes < Self::ADDRESS_SPACE => {}
            _ => {
                let limit = Self::ADDRESS_SPACE;
                return Err(KvError::StatesTooLarge { limit });
            }
        }
        let any = states.iter().any(|&elements| elements > 0);
        let states = if any { states } else { Vec::new() };
        let geometry = Self {
            states: states.into(),
            ..self
        };
        geometry.validate()?;
        Ok(geometry)
    }

    /// The same, each of whose states a token changes by what it makes of so many f32 elements. A step can then go back
    /// to its first tokens ([`Sequence::rewind`](crate::Sequence::rewind)).
    ///
    /// # Errors
    /// [`KvError::States`] unless there is a number for every layer, and [`KvError::StatesTooLarge`].
    pub fn with_state_inputs(self, inputs: Vec<usize>) -> Result<Self, KvError> {
        let layers = self.layers.len();
        if inputs.len() != layers {
            let states = inputs.len();
            return Err(KvError::States { layers, states });
        }
        let sum = inputs.iter().try_fold(0, |sum: usize, &elements| {
            sum.checked_add(elements.checked_mul(size_of::<f32>())?)
        });
        let limit = Self::ADDRESS_SPACE;
        match sum {
            // Those of as many tokens as a step may go back from.
            Some(sum) if sum < limit / Self::MOST_REWOUND_TOKENS => Ok(Self {
                state_inputs: match self.has_states() {
                    true => inputs.into(),
                    false => Arc::default(),
                },
                ..self
            }),
            _ => Err(KvError::StatesTooLarge { limit }),
        }
    }

    /// Checks that there is something to hold, that layers read rows that are there, and that sizes
    /// fit the address space; every other method may be called once it has succeeded.
    ///
    /// # Errors
    /// [`KvError::EmptyGeometry`] and [`KvError::EmptyRows`] for nothing to hold,
    /// [`KvError::ValuesBeyondKeys`] for values that are to be part of shorter keys, [`KvError::NoRows`]
    /// when a layer is to read rows that no earlier layer has, [`KvError::HeadDim`] when a head is no
    /// whole number of an element type's blocks, or [`KvError::ContextTooLarge`] for a token that
    /// fills the address space by itself.
    pub fn validate(&self) -> Result<(), KvError> {
        match self.has_rows() || self.has_states() {
            true => self.check_layers(),
            false => Err(KvError::EmptyGeometry),
        }
    }

    fn check_layers(&self) -> Result<(), KvError> {
        for (index, cache) in self.layers.iter().enumerate() {
            match *cache {
                LayerCache::Rows(rows) => self.check_rows(Layer(index), rows)?,
                LayerCache::Of(source) => {
                    let there =
                        source.0 < index && matches!(self.layers[source.0], LayerCache::Rows(_));
                    if !there {
                        return Err(KvError::NoRows {
                            layer: index,
                            source_layer: source.0,
                        });
                    }
                }
                LayerCache::None => {}
            }
        }
        let elements = self.count_elements();
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

    fn check_rows(&self, layer: Layer, rows: RowSpec) -> Result<(), KvError> {
        let RowSpec {
            kv_heads,
            key_dim,
            value_dim,
            values,
            ..
        } = rows;
        if kv_heads == 0 || key_dim == 0 || value_dim == 0 {
            return Err(KvError::EmptyRows {
                layer: layer.0,
                kv_heads,
                key_dim,
                value_dim,
            });
        }
        if values == ValueRows::InKeys && value_dim > key_dim {
            return Err(KvError::ValuesBeyondKeys {
                layer: layer.0,
                key_dim,
                value_dim,
            });
        }
        for side in Side::BOTH {
            let element = self.element(rows.stored_in(side));
            let checked = element.check_head_dim(rows.head_dim(side));
            checked.map_err(|why| KvError::HeadDim {
                layer: layer.0,
                why,
            })?;
        }
        Ok(())
    }

    /// [`Geometry::elements_per_token`], or `None` when they cannot be counted.
    fn count_elements(&self) -> Option<usize> {
        let layer = |(_, rows): (Layer, RowSpec)| {
            let width = match rows.values {
                ValueRows::Apart => rows.key_dim.checked_add(rows.value_dim)?,
                ValueRows::InKeys => rows.key_dim,
            };
            rows.kv_heads.checked_mul(width)
        };
        let mut layers = self.own_rows().map(layer);
        layers.try_fold(0usize, |sum, elements| sum.checked_add(elements?))
    }

    /// What each layer keeps.
    #[must_use]
    pub fn layers(&self) -> &[LayerCache] {
        &self.layers
    }

    /// The layers that have rows of their own.
    pub fn own_rows(&self) -> impl Iterator<Item = (Layer, RowSpec)> {
        let layers = self.layers.iter().enumerate();
        layers.filter_map(|(index, cache)| match *cache {
            LayerCache::Rows(rows) => Some((Layer(index), rows)),
            LayerCache::Of(_) | LayerCache::None => None,
        })
    }

    /// The layer whose rows `layer` reads, which is itself where it has any, and what they are.
    #[must_use]
    pub fn rows(&self, layer: Layer) -> Option<(Layer, RowSpec)> {
        match *self.layers.get(layer.0)? {
            LayerCache::Rows(rows) => Some((layer, rows)),
            LayerCache::Of(source) => match *self.layers.get(source.0)? {
                LayerCache::Rows(rows) => Some((source, rows)),
                LayerCache::Of(_) | LayerCache::None => None,
            },
            LayerCache::None => None,
        }
    }

    /// Elements of the widest row there is, of either side.
    #[must_use]
    pub fn widest_row(&self) -> usize {
        let widest = |(_, rows): (Layer, RowSpec)| {
            let sides = Side::BOTH.map(|side| rows.row_elements(side));
            sides.into_iter().max()
        };
        self.own_rows().filter_map(widest).max().unwrap_or(0)
    }

    /// How elements are stored.
    #[must_use]
    pub fn elements(&self) -> KvElements {
        self.elements
    }

    /// The same layers with other storage.
    #[must_use]
    pub fn with_elements(&self, elements: KvElements) -> Self {
        Self {
            elements,
            ..self.clone()
        }
    }

    /// The same where layers with windows keep all rows, so that a sequence can go back to any length.
    #[must_use]
    pub fn keeping_all(&self) -> Self {
        let keeping = |cache: &LayerCache| match *cache {
            LayerCache::Rows(rows) => LayerCache::Rows(RowSpec {
                keep: Keep::All,
                ..rows
            }),
            other => other,
        };
        Self {
            layers: self.layers.iter().map(keeping).collect(),
            ..self.clone()
        }
    }

    /// The same where the first `layers` layers are computed by the host and the others by a device: each keeps its rows in
    /// memory of whoever computes it. 0 where one computes all.
    ///
    /// # Errors
    /// [`KvError::SplitRows`] where a layer of the device reads rows of one of the host's.
    pub fn with_host_layers(self, layers: usize) -> Result<Self, KvError> {
        for (index, cache) in self.layers.iter().enumerate().skip(layers) {
            if let LayerCache::Of(source) = cache
                && source.0 < layers
            {
                return Err(KvError::SplitRows {
                    host_layers: layers,
                    layer: index,
                    source_layer: source.0,
                });
            }
        }
        Ok(Self {
            host_layers: layers,
            ..self
        })
    }

    /// The same with keys that are stored smoothed, as far as `smoothing` says.
    ///
    /// # Panics
    /// When it is of keys of another size, or of layers whose keys are not stored for themselves.
    #[must_use]
    pub fn with_key_smoothing(self, smoothing: KeySmoothing) -> Self {
        for (layer, keys) in smoothing.layers() {
            let fits = matches!(
                self.layers.get(layer.0),
                Some(LayerCache::Rows(rows))
                    if rows.values == ValueRows::Apart
                        && rows.row_elements(Side::Key) == keys.centre().len()
            );
            assert!(fits, "layer {} has other keys", layer.0);
        }
        Self {
            smoothing: Some(smoothing),
            ..self
        }
    }

    /// What the keys that `layer` reads are changed by before they are stored, and its queries with them; `None` where keys are
    /// stored as they are.
    #[must_use]
    pub fn key_smoothing(&self, layer: Layer) -> Option<&SmoothedKeys> {
        let smoothing = self.smoothing.as_ref()?;
        let (source, _) = self.rows(layer)?;
        smoothing.layer(source)
    }

    /// How many of the first layers the host computes, where a device computes the others; 0 where one computes all.
    #[must_use]
    pub fn host_layers(&self) -> usize {
        self.host_layers
    }

    /// What is left of it without the host's layers: what a device has memory of.
    #[must_use]
    pub fn without_host_layers(&self) -> Self {
        let first = self.host_layers;
        let layers = self.layers.iter().enumerate();
        let layers = layers.map(|(layer, cache)| match layer < first {
            true => LayerCache::None,
            false => *cache,
        });
        let left = |all: &[usize]| {
            let left: Vec<usize> = self.there(all, Location::Own).collect();
            match left.iter().any(|&elements| elements > 0) {
                true => left.into(),
                false => Arc::default(),
            }
        };
        Self {
            layers: layers.collect(),
            states: left(&self.states),
            state_inputs: left(&self.state_inputs),
            elements: self.elements,
            host_layers: 0,
            smoothing: None,
        }
    }

    /// Whose memory has the rows and the state of `layer`.
    #[must_use]
    pub fn location(&self, layer: Layer) -> Location {
        match layer.0 < self.host_layers {
            true => Location::Host,
            false => Location::Own,
        }
    }

    /// Whether any layer keeps rows of its own.
    #[must_use]
    pub fn has_rows(&self) -> bool {
        self.own_rows().next().is_some()
    }

    /// The same where nobody is told what changes the states, so that no step can go back.
    #[must_use]
    pub fn without_state_inputs(self) -> Self {
        Self {
            state_inputs: Arc::default(),
            ..self
        }
    }

    /// Whether any layer keeps a state.
    #[must_use]
    pub fn has_states(&self) -> bool {
        !self.states.is_empty()
    }

    /// Elements of the state that `layer` keeps; 0 for none.
    #[must_use]
    pub fn state_elements(&self, layer: Layer) -> usize {
        self.states.get(layer.0).copied().unwrap_or(0)
    }

    /// Bytes of all layers' states, however many tokens there are.
    #[must_use]
    pub fn state_bytes(&self) -> usize {
        self.state_buffers().sum()
    }

    /// The same in whole pages of `page_bytes` bytes.
    #[must_use]
    pub fn state_bytes_in_pages(&self, page_bytes: usize) -> usize {
        let buffers = self.state_buffers();
        buffers
            .map(|bytes| bytes.next_multiple_of(page_bytes))
            .sum()
    }

    /// Bytes of the states in memory of each kind.
    fn state_buffers(&self) -> impl Iterator<Item = usize> {
        let places = Location::ALL.map(|location| self.state_places(location));
        let ends = places.map(|places| places.last().map_or(0, |place| place.end));
        ends.into_iter()
    }

    /// Whether a step can go back to its first tokens: there are no states, or it is known what changes them.
    #[must_use]
    pub fn can_rewind(&self) -> bool {
        !self.has_states() || !self.state_inputs.is_empty()
    }

    /// Elements for each token of what changes the state of `layer`; 0 where that is not known.
    #[must_use]
    pub fn state_input_elements(&self, layer: Layer) -> usize {
        self.state_inputs.get(layer.0).copied().unwrap_or(0)
    }

    /// Bytes that a step of `tokens` tokens takes beside states so that it can go back to its first: a second place for
    /// all states, and what changes them.
    #[must_use]
    pub fn rewind_bytes(&self, tokens: usize) -> usize {
        match self.has_states() {
            true => self.state_bytes() + tokens * self.state_input_bytes(),
            false => 0,
        }
    }

    /// Bytes of what changes all states, for each token.
    pub(crate) fn state_input_bytes(&self) -> usize {
        self.state_inputs.iter().sum::<usize>() * size_of::<f32>()
    }

    /// Elements of the inputs of all layers before each, for each token, of layers in memory of one kind.
    pub(crate) fn state_input_places(&self, location: Location) -> Arc<[Range<usize>]> {
        let mut end = 0;
        let place = |elements: usize| {
            let start = end;
            end += elements;
            start..end
        };
        self.there(&self.state_inputs, location)
            .map(place)
            .collect()
    }

    /// The bytes of each layer's state where all of them in memory of one kind lie one after the other; none of the others'.
    pub(crate) fn state_places(&self, location: Location) -> Arc<[Range<usize>]> {
        let mut end = 0usize;
        let place = |elements: usize| {
            let start = match elements {
                0 => end,
                _ => end.next_multiple_of(Self::STATE_ALIGNMENT),
            };
            end = start + elements * size_of::<f32>();
            start..end
        };
        self.there(&self.states, location).map(place).collect()
    }

    /// What each layer has of `all`, with nothing for those whose memory is of another kind.
    fn there(&self, all: &[usize], location: Location) -> impl Iterator<Item = usize> {
        let layers = all.iter().enumerate();
        layers.map(
            move |(layer, &elements)| match self.location(Layer(layer)) == location {
                true => elements,
                false => 0,
            },
        )
    }

    /// Storage of one element of `side`, where both are stored.
    #[must_use]
    pub fn element(&self, side: Side) -> ElementType {
        match side {
            Side::Key => self.elements.key,
            Side::Value => self.elements.value,
        }
    }

    /// Elements of the blocks in which heads of `side` that `layer` reads are transformed before they are stored, and
    /// what is computed with them; `None` where they are stored as they are. See [`ElementType::rotation`].
    #[must_use]
    pub fn rotation(&self, layer: Layer, side: Side) -> Option<NonZeroUsize> {
        let (_, rows) = self.rows(layer)?;
        let element = self.element(rows.stored_in(side));
        match rows.values {
            ValueRows::Apart => element.rotation(&[rows.head_dim(side)]),
            // Values are part of what is transformed.
            ValueRows::InKeys => element.rotation(&[rows.key_dim, rows.value_dim]),
        }
    }

    /// Bytes of one row of `rows`, of a side that is stored.
    #[must_use]
    pub fn row_bytes(&self, rows: &RowSpec, side: Side) -> usize {
        rows.kv_heads * self.element(side).bytes(rows.head_dim(side))
    }

    /// Bytes that one token takes in a layer of `rows`.
    fn layer_bytes(&self, rows: &RowSpec) -> usize {
        let sides = rows.stored_sides().iter();
        sides.map(|side| self.row_bytes(rows, *side)).sum()
    }

    /// Elements one token takes over all layers, K and V.
    #[must_use]
    pub fn elements_per_token(&self) -> usize {
        self.count_elements().unwrap_or(usize::MAX)
    }

    /// Whether some layer's rows are of use for a while only.
    #[must_use]
    pub fn has_windows(&self) -> bool {
        let mut rows = self.own_rows();
        rows.any(|(_, rows)| rows.keep != Keep::All)
    }

    /// Bytes that each token more takes for good: K and V in the layers that keep all rows.
    #[must_use]
    pub fn kept_bytes_per_token(&self) -> usize {
        let full = self.own_rows().filter(|(_, rows)| rows.keep == Keep::All);
        full.map(|(_, rows)| self.layer_bytes(&rows)).sum()
    }

    /// Bytes of full windows, K and V in the layers that have one: what they come to, however many
    /// tokens there are.
    #[must_use]
    pub fn window_bytes(&self) -> usize {
        let layers = self.own_rows().map(|(_, rows)| match rows.keep {
            Keep::All => 0,
            Keep::Window(window) => window.get().saturating_mul(self.layer_bytes(&rows)),
        });
        layers.fold(0, usize::saturating_add)
    }

    /// Bytes of the rows that are of use after `tokens` tokens.
    #[must_use]
    pub fn useful_bytes(&self, tokens: usize) -> usize {
        self.row_bytes_where(|keep| tokens - keep.first_seen(tokens))
    }

    /// Bytes of as many rows of each layer as `count` says.
    pub(crate) fn row_bytes_where(&self, count: impl Fn(Keep) -> usize) -> usize {
        let layers = self.own_rows();
        layers
            .map(|(_, rows)| count(rows.keep) * self.layer_bytes(&rows))
            .sum()
    }

    /// Bytes one token takes over all layers, K and V, as if every layer kept all rows.
    #[must_use]
    pub fn bytes_per_token(&self) -> usize {
        let layers = self.own_rows();
        layers.map(|(_, rows)| self.layer_bytes(&rows)).sum()
    }

    /// Bytes of `tokens` tokens over all layers, K and V, as if every layer kept all rows.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qwen3_4b(elements: KvElements) -> Geometry {
        Geometry::uniform(36, 8, 128, elements)
    }

    const F16: KvElements = KvElements::both(ElementType::F16);
    const F32: KvElements = KvElements::both(ElementType::F32);

    fn rows(kv_heads: usize, head_dim: usize, keep: Keep) -> LayerCache {
        LayerCache::Rows(RowSpec {
            kv_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            values: ValueRows::Apart,
            keep,
        })
    }

    #[test]
    fn published_sizes_come_out_exactly() {
        assert_eq!(qwen3_4b(F16).bytes_per_token(), 147_456);
        assert_eq!(qwen3_4b(F16).bytes(32_768).unwrap(), 9 << 29, "4.5 GiB");
        let qwen3_06b = Geometry::uniform(28, 8, 128, F32);
        assert_eq!(qwen3_06b.bytes(1024).unwrap(), 234_881_024);
    }

    #[test]
    fn layers_that_read_the_rows_of_another_have_its_smoothing() {
        let layers = vec![
            rows(2, 32, Keep::All),
            LayerCache::Of(Layer(0)),
            rows(1, 32, Keep::All),
            LayerCache::None,
        ];
        let plain = Geometry::new(layers, F16).unwrap();
        let keys = SmoothedKeys::new(vec![0.0; 64], vec![2.0; 64]);
        let smoothing = KeySmoothing::new(vec![Some(keys.clone()), None, None, None]);
        let smoothed = plain.clone().with_key_smoothing(smoothing);
        let of = |layer| smoothed.key_smoothing(Layer(layer));
        assert_eq!(
            [of(0), of(1), of(2), of(3)],
            [Some(&keys), Some(&keys), None, None]
        );
        assert!(plain.key_smoothing(Layer(0)).is_none());
        assert_ne!(plain, smoothed);
        assert_ne!(
            format!("{plain:?}"),
            format!("{smoothed:?}"),
            "what files say of rows"
        );
    }

    #[test]
    #[should_panic(expected = "layer 1 has other keys")]
    fn smoothing_of_keys_that_are_not_stored_is_refused() {
        let layers = vec![rows(2, 32, Keep::All), LayerCache::Of(Layer(0))];
        let keys = SmoothedKeys::new(vec![0.0; 64], vec![2.0; 64]);
        let smoothing = KeySmoothing::new(vec![None, Some(keys)]);
        let _ = Geometry::new(layers, F16)
            .unwrap()
            .with_key_smoothing(smoothing);
    }

    #[test]
    fn what_layers_of_several_kinds_take_is_told_kind_by_kind() {
        let window = Keep::Window(NonZeroUsize::new(5).unwrap());
        assert!(!Geometry::uniform(1, 2, 64, F16).has_windows());
        let layers = vec![rows(2, 64, Keep::All), rows(1, 32, window)];
        let geometry = Geometry::new(layers, F16).unwrap();
        assert!(geometry.has_windows());
        assert_eq!(geometry.widest_row(), 128);
        assert_eq!(geometry.elements_per_token(), 2 * (128 + 32));
        assert_eq!(geometry.kept_bytes_per_token(), 512);
        // Before the next token four rows of the window are of use.
        assert_eq!(geometry.useful_bytes(10), 10 * 512 + 4 * 128);
    }

    #[test]
    fn rows_without_heads_or_without_width_are_refused() {
        for (kv_heads, key_dim, value_dim) in [(0, 64, 64), (1, 0, 64), (1, 64, 0)] {
            let rows = RowSpec {
                kv_heads,
                key_dim,
                value_dim,
                values: ValueRows::Apart,
                keep: Keep::All,
            };
            let refused = Geometry::new(vec![LayerCache::Rows(rows)], F16).unwrap_err();
            assert!(
                matches!(refused, KvError::EmptyRows { layer: 0, .. }),
                "{refused}"
            );
        }
    }

    #[test]
    fn keys_and_values_are_sized_each_by_their_own_element_and_width() {
        let mixed = KvElements {
            key: ElementType::F32,
            ..F16
        };
        assert_eq!(qwen3_4b(mixed).bytes_per_token(), 36 * (4096 + 2048));
        let rows = RowSpec {
            kv_heads: 2,
            key_dim: 192,
            value_dim: 128,
            values: ValueRows::Apart,
            keep: Keep::All,
        };
        let geometry = Geometry::new(vec![LayerCache::Rows(rows); 3], mixed).unwrap();
        assert_eq!(geometry.row_bytes(&rows, Side::Key), 2 * 192 * 4);
        assert_eq!(geometry.row_bytes(&rows, Side::Value), 2 * 128 * 2);
        assert_eq!(geometry.bytes_per_token(), 3 * (1536 + 512));
    }

    /// DeepSeek V2 Lite: 27 layers that keep one row of 512 elements and 64 that position turned.
    const LATENT: RowSpec = RowSpec {
        kv_heads: 1,
        key_dim: 576,
        value_dim: 512,
        values: ValueRows::InKeys,
        keep: Keep::All,
    };

    #[test]
    fn values_that_are_part_of_keys_take_no_bytes() {
        let of = |elements| Geometry::new(vec![LayerCache::Rows(LATENT); 27], elements).unwrap();
        assert_eq!(of(F16).bytes_per_token(), 27 * 1152);
        assert_eq!(of(F16).elements_per_token(), 27 * 576);
        // What values are to be stored as is of no account.
        let mixed = KvElements {
            key: ElementType::Q8_0,
            value: ElementType::F32,
        };
        assert_eq!(of(mixed).bytes_per_token(), 27 * 18 * 34);
    }

    #[test]
    fn values_that_are_part_of_keys_are_no_longer_than_those_and_whole_blocks() {
        let refused = |key_dim, value_dim, element| {
            let rows = RowSpec {
                key_dim,
                value_dim,
                ..LATENT
            };
            let layers = vec![LayerCache::Rows(rows)];
            Geometry::new(layers, KvElements::both(element)).unwrap_err()
        };
        assert!(matches!(
            refused(64, 65, ElementType::F16),
            KvError::ValuesBeyondKeys {
                layer: 0,
                key_dim: 64,
                value_dim: 65
            }
        ));
        assert!(matches!(
            refused(64, 48, ElementType::Q4_0),
            KvError::HeadDim { layer: 0, .. }
        ));
    }

    /// What is all of a key can be its value.
    #[test]
    fn values_may_be_as_long_as_the_keys_that_they_are_part_of() {
        let rows = RowSpec {
            value_dim: LATENT.key_dim,
            ..LATENT
        };
        assert!(Geometry::new(vec![LayerCache::Rows(rows)], F16).is_ok());
    }

    #[test]
    fn heads_are_transformed_in_blocks_that_all_that_read_them_have() {
        let blocks = |cache, elements: KvElements| {
            let layers = vec![cache, LayerCache::None, LayerCache::Of(Layer(0))];
            let geometry = Geometry::new(layers, elements).unwrap();
            assert_eq!(geometry.rotation(Layer(1), Side::Key), None, "no rows");
            let of = |layer| Side::BOTH.map(|side| geometry.rotation(Layer(layer), side));
            assert_eq!(of(0), of(2), "rows of another layer");
            of(0).map(|block| block.map(NonZeroUsize::get))
        };
        let apart = rows(8, 96, Keep::All);
        let latent = LayerCache::Rows(LATENT);
        let mixed = |key, value| KvElements { key, value };
        assert_eq!(blocks(apart, F16), [None, None]);
        let keys = mixed(ElementType::Q8_0, ElementType::F16);
        assert_eq!(blocks(apart, keys), [Some(32), None]);
        let values = mixed(ElementType::F16, ElementType::Q4_0);
        assert_eq!(blocks(apart, values), [None, Some(32)]);
        // Of 576 elements and of the first 512 of them.
        assert_eq!(blocks(latent, keys), [Some(64), Some(64)]);
        assert_eq!(blocks(latent, values), [None, None]);
    }

    #[test]
    fn layers_that_keep_all_rows_are_otherwise_the_same() {
        let window = Keep::Window(NonZeroUsize::new(512).unwrap());
        let layers = |keep| {
            let others = [LayerCache::None, LayerCache::Of(Layer(0))];
            [&[rows(1, 256, keep), rows(1, 64, Keep::All)], &others[..]].concat()
        };
        let states = vec![0, 0, 7, 0];
        let of = |keep| {
            let geometry = Geometry::new(layers(keep), F16).unwrap();
            geometry.with_states(states.clone()).unwrap()
        };
        assert!(of(window).has_windows());
        assert_eq!(of(window).keeping_all(), of(Keep::All));
        assert_eq!(of(Keep::All).keeping_all(), of(Keep::All));
    }

    /// Gemma 4 E2B: of 35 layers the last 20 read rows of the last full or windowed layer before.
    #[test]
    fn layers_that_read_anothers_rows_take_no_bytes() {
        let window = Keep::Window(NonZeroUsize::new(512).unwrap());
        let own = (0..15).map(|layer| match layer % 5 {
            4 => rows(1, 512, Keep::All),
            _ => rows(1, 256, window),
        });
        let shared = (15..35).map(|layer| match layer % 5 {
            4 => LayerCache::Of(Layer(14)),
            _ => LayerCache::Of(Layer(13)),
        });
        let geometry = Geometry::new(own.chain(shared).collect(), F16).unwrap();
        assert_eq!(geometry.bytes_per_token(), 3 * 2048 + 12 * 1024);
        assert_eq!(
            geometry.rows(Layer(20)).map(|(layer, _)| layer),
            Some(Layer(13))
        );
        assert_eq!(
            geometry.rows(Layer(34)).map(|(layer, _)| layer),
            Some(Layer(14))
        );
        assert_eq!(
            geometry.rows(Layer(3)).map(|(layer, _)| layer),
            Some(Layer(3))
        );
        assert_eq!(geometry.rows(Layer(35)), None);
        assert_eq!(geometry.own_rows().count(), 15);
    }

    #[test]
    fn a_layer_cannot_read_rows_that_no_earlier_layer_has() {
        let own = rows(1, 64, Keep::All);
        let of = |layer| LayerCache::Of(Layer(layer));
        for layers in [
            vec![of(0), own],
            vec![own, of(1)],
            vec![own, of(2), own],
            vec![own, LayerCache::None, of(1)],
            vec![own, of(0), of(1)],
            vec![own, of(usize::MAX)],
        ] {
            let error = Geometry::new(layers, F16).unwrap_err();
            assert!(matches!(error, KvError::NoRows { .. }), "{error}");
        }
        let layers = vec![LayerCache::None, own, LayerCache::None, of(1)];
        let geometry = Geometry::new(layers, F16).unwrap();
        assert_eq!(geometry.rows(Layer(0)), None);
        assert_eq!(geometry.rows(Layer(3)), geometry.rows(Layer(1)));
    }

    #[test]
    fn a_query_sees_as_many_rows_as_its_window_has_and_its_own_is_the_last() {
        let window = Keep::Window(NonZeroUsize::new(4).unwrap());
        let seen = [0, 3, 4, 9].map(|position| window.first_seen(position));
        assert_eq!(seen, [0, 0, 1, 6]);
        assert_eq!(Keep::All.first_seen(9), 0);
    }

    #[test]
    fn heads_that_are_no_whole_blocks_are_refused_by_the_layers_number() {
        let q8_0 = KvElements {
            value: ElementType::Q8_0,
            ..F16
        };
        let layers = vec![rows(8, 128, Keep::All), rows(8, 80, Keep::All)];
        let error = Geometry::new(layers, q8_0).unwrap_err();
        assert!(
            matches!(error, KvError::HeadDim { layer: 1, .. }),
            "{error}"
        );
        let quantized = qwen3_4b(q8_0);
        assert!(quantized.validate().is_ok());
        assert_eq!(quantized.bytes_per_token(), 36 * 8 * (256 + 4 * 34));
    }

    #[test]
    fn a_context_of_the_whole_address_space_is_one_token_too_long() {
        let token = Geometry::uniform(1, 1, 2, F32);
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
                qwen3_4b(F16).bytes(tokens),
                Err(KvError::ContextTooLarge { .. })
            ));
        }
    }

    #[test]
    fn states_lie_one_after_the_other_each_from_a_boundary_on() {
        let geometry = Geometry::uniform(4, 8, 128, F16);
        let stateless = geometry.clone().with_states(vec![0; 4]).unwrap();
        assert_eq!(stateless, geometry);
        assert_eq!((geometry.has_states(), geometry.state_bytes()), (false, 0));
        let states = geometry.with_states(vec![3, 0, 16, 1]).unwrap();
        assert!(states.has_states());
        let own = |states: &Geometry| states.state_places(Location::Own);
        assert_eq!(*own(&states), [0..12, 12..12, 64..128, 128..132]);
        assert_eq!(states.state_bytes(), 132);
        let elements = [0, 1, 2, 3, 4].map(|layer| states.state_elements(Layer(layer)));
        assert_eq!(elements, [3, 0, 16, 1, 0]);
        assert_eq!(
            states.with_elements(F32).state_bytes(),
            132,
            "states are f32"
        );
    }

    #[test]
    fn layers_may_keep_nothing_but_a_state() {
        let layers = || Geometry::new(vec![LayerCache::None; 2], F16).unwrap();
        let states = layers().with_states(vec![0, 5]).unwrap();
        assert!(states.has_states() && !states.has_rows());
        assert_eq!((states.bytes_per_token(), states.state_bytes()), (0, 20));
        let none = layers().with_states(vec![0, 0]).unwrap_err();
        assert!(matches!(none, KvError::EmptyGeometry), "{none}");
        let short = layers().with_states(vec![5]).unwrap_err();
        assert!(matches!(
            short,
            KvError::States {
                layers: 2,
                states: 1
            }
        ));
        for absurd in [vec![usize::MAX, 1], vec![1 << 44, 1 << 44]] {
            let absurd = layers().with_states(absurd).unwrap_err();
            assert!(matches!(absurd, KvError::StatesTooLarge { .. }), "{absurd}");
        }
    }

    /// Each state has a boundary to begin on, which counts.
    #[test]
    fn states_of_the_whole_address_space_are_one_element_too_many() {
        let of = |elements| {
            let layers = Geometry::new(vec![LayerCache::None], F16).unwrap();
            layers.with_states(vec![elements])
        };
        let whole = (Geometry::ADDRESS_SPACE - Geometry::STATE_ALIGNMENT) / size_of::<f32>();
        assert!(matches!(of(whole), Err(KvError::StatesTooLarge { .. })));
        assert_eq!(of(whole - 1).unwrap().state_bytes(), 4 * (whole - 1));
    }

    #[test]
    fn shapes_with_nothing_in_them_or_past_the_address_space_are_refused() {
        for empty in [
            Geometry::uniform(0, 8, 128, F16),
            Geometry::new(vec![LayerCache::None], F16).unwrap(),
        ] {
            let error = empty.validate().unwrap_err();
            assert!(matches!(error, KvError::EmptyGeometry), "{error}");
        }
        for (kv_heads, head_dim) in [(0, 128), (8, 0)] {
            let layers = vec![rows(8, 128, Keep::All), rows(kv_heads, head_dim, Keep::All)];
            let error = Geometry::new(layers, F16).unwrap_err();
            assert!(
                matches!(error, KvError::EmptyRows { layer: 1, .. }),
                "{error}"
            );
        }
        let most = |head_dim| Geometry::uniform(1 << 10, 1 << 20, head_dim, F16);
        assert!(most((1 << 14) - 1).validate().is_ok());
        // Of the last, K and V of elements of four bytes are exactly the address space.
        for (layers, kv_heads, head_dim) in [
            (1, usize::MAX, 128),
            (1, 8, usize::MAX / 2 + 1),
            (2, 1 << 62, 2),
            (1 << 10, 1 << 20, 1 << 14),
        ] {
            let absurd = Geometry::uniform(layers, kv_heads, head_dim, F16);
            assert!(
                matches!(absurd.validate(), Err(KvError::ContextTooLarge { .. })),
                "{layers} {kv_heads} {head_dim}"
            );
        }
    }
}
