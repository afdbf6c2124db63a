//! What shapes the bytes of an engine's KV cache, for those that come after it.

use std::io;
use std::path::Path;

use lacuna_kernels::MatmulPrecision;
use lacuna_kv::folder::Fingerprint;

use crate::engine::Engine;

impl Engine {
    /// Everything that shapes a byte of the KV cache besides how it is held. What was found of weights is remembered
    /// in `folder`, since finding it takes reading all of them.
    ///
    /// # Errors
    /// When weights cannot be read.
    pub(crate) fn fingerprint(&self, folder: &Path) -> io::Result<Fingerprint> {
        let (model, spec) = (self.model(), self.model().spec());
        let weights = model.files().content(Some(folder))?;
        let mut parts = vec![
            ("weights", blake3::Hash::from_bytes(weights).to_string()),
            ("tokenizer", self.vocabulary_hash().to_string()),
            // Positions are rotated as it says.
            ("architecture", hash(&format!("{spec:?}"))),
            ("KV type", self.kv_cache().geometry().elements().to_string()),
            // Results are the same with any number of threads, and by any split into steps, but not with other
            // instructions.
            ("instructions", self.cpu().level().name().to_owned()),
            ("numerics", lacuna_models::NUMERICS_VERSION.to_string()),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ];
        let (products, in_tiles) = (self.cpu().precision(), self.cpu().precision_in_tiles());
        if products != MatmulPrecision::F32 {
            parts.push(("products", products.name().to_owned()));
        }
        if in_tiles != products {
            parts.push(("products of attention in tiles", in_tiles.name().to_owned()));
        }
        // Rows of images are what it makes of their pixels, by which they are named. It may lie in a file beside the model's.
        if let Some(images) = model.images() {
            let encoder = images.content(Some(folder))?;
            parts.push((
                "image encoder",
                blake3::Hash::from_bytes(encoder).to_string(),
            ));
        }
        // A device adds in another order than the processor, and than other devices.
        let device = self.device();
        parts.extend(device.map(|device| ("device", device.name)));
        Ok(Fingerprint::new(parts))
    }

    /// Which token is which.
    fn vocabulary_hash(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for id in 0..self.model().spec().vocabulary as u32 {
            let text = self.model().tokenizer().token_text(id).unwrap_or_default();
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        hasher.finalize()
    }
}

fn hash(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_string()
}
