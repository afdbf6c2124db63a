//! Any bytes are an image of the size that its header says or a typed error, within bounded memory; and any GGUF metadata
//! is that of an encoder whose plan holds, or of none.
#![no_main]

use lacuna_files::{Mapping, ModelFiles};
use lacuna_images::{FIRST_TOKEN, Filter, Header, Limits, Picture};
use lacuna_models::BatchLimits;
use lacuna_models::describe_images;
use lacuna_models::plan::ArenaPlan;
use lacuna_models::program::Program;
use libfuzzer_sys::fuzz_target;

const LIMITS: Limits = Limits {
    bytes: 1 << 20,
    pixels: 1 << 20,
};

fuzz_target!(|bytes: &[u8]| {
    match Header::read(bytes, &LIMITS) {
        Ok(header) => decode(bytes, &header),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    if let Ok(files) = ModelFiles::from_gguf(Mapping::from(bytes.to_vec()))
        && let Ok(Some(spec)) = describe_images(&files)
        && spec.layers.len() <= 64
    {
        let program = Program::new(&spec);
        let limits = BatchLimits {
            tokens: 4,
            logit_rows: 1,
            context_tokens: 4,
        };
        if let Ok(plan) = ArenaPlan::new(&program, limits) {
            assert_eq!(plan.verify(&program), Ok(()));
        }
    }
});

fn decode(bytes: &[u8], header: &Header) {
    match header.decode(bytes) {
        Ok(image) => {
            let found = [image.width(), image.height()];
            let [width, height] = [header.width, header.height].map(|size| size as usize);
            assert!(found == [width, height] || found == [height, width]);
            let picture = Picture::of(&image, [16, 8], Filter::Cubic);
            assert_eq!(picture.pixels().len(), 16 * 8 * 3);
            assert!(
                picture
                    .name()
                    .tokens([2, 2])
                    .iter()
                    .all(|token| *token >= FIRST_TOKEN)
            );
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
