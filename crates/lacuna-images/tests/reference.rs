//! Files of all kinds against what Pillow and transformers make of them, and what is no such file.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use lacuna_images::{Error, Filter, Format, Header, Image, Limits, Picture, Tiling, resize};
use proptest::prelude::*;
use serde::Deserialize;

/// What decoders of JPEG may differ by after resizing: each rounds the inverse transform and enlarges channels of color in a
/// way of its own, and Pillow's are libjpeg-turbo's.
const LOSSY: u8 = 2;

#[derive(Deserialize)]
struct Expected {
    side: usize,
    files: BTreeMap<String, Said>,
}

#[derive(Deserialize)]
struct Said {
    size: [usize; 2],
    /// Decoders may differ in how they round what was left out.
    lossy: bool,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../reference/images")
}

fn file(name: &str) -> Vec<u8> {
    fs::read(folder().join(name)).expect("a committed fixture")
}

fn decoded(file: &[u8]) -> Result<Image, Error> {
    Header::read(file, &Limits::default())?.decode(file)
}

/// The largest difference of two images.
fn worst(found: &[u8], wanted: &[u8]) -> u8 {
    assert_eq!(found.len(), wanted.len());
    let pairs = found.iter().zip(wanted);
    let differences = pairs.map(|(found, wanted)| found.abs_diff(*wanted));
    differences.max().unwrap_or(0)
}

/// In the order in which the file has them.
fn names() -> Vec<String> {
    let text = String::from_utf8(file("expected.json")).expect("UTF-8");
    let expected: Expected = serde_json::from_str(&text).expect("valid JSON");
    let mut names: Vec<String> = expected.files.into_keys().collect();
    names.sort_by_key(|name| text.find(&format!("\"{name}\"")));
    names
}

#[test]
fn preprocessing_is_the_references_to_one_in_255() {
    let expected: Expected = serde_json::from_slice(&file("expected.json")).expect("valid JSON");
    let side = expected.side;
    let pixels = file("expected.u8");
    let mut of_file = pixels.chunks_exact(2 * side * side * 3);
    for name in names() {
        let said = &expected.files[&name];
        let mut wanted = of_file
            .next()
            .expect("for each file")
            .chunks_exact(side * side * 3);
        let mut wanted = || wanted.next().expect("two of each file");
        let image = decoded(&file(&name)).expect(&name);
        assert_eq!([image.width(), image.height()], said.size, "{name}");
        let pillow = worst(
            resize(&image, [side; 2], Filter::Triangle).pixels(),
            wanted(),
        );
        let transformers = worst(
            Picture::of(&image, [side; 2], Filter::Triangle).pixels(),
            wanted(),
        );
        println!("{name}: Pillow {pillow}, transformers {transformers}");
        let most = if said.lossy { LOSSY } else { 1 };
        assert!(pillow.max(transformers) <= most, "{name}");
    }
    assert!(of_file.next().is_none());
}

/// The same of images that keep their shapes.
#[derive(Deserialize)]
struct OwnSize {
    sizes: BTreeMap<String, [usize; 2]>,
}

#[test]
fn preprocessing_to_other_sizes_is_the_references_to_one_in_255() {
    let expected: Expected = serde_json::from_slice(&file("expected.json")).expect("valid JSON");
    // Within bounds of all pixels, and of those of the longer side; and as large as bounds let them be.
    let all = ["own-size", "longest-edge", "filled"].map(|it| {
        let sizes: Vec<OwnSize> =
            serde_json::from_slice(&file(&format!("{it}.json"))).expect("valid JSON");
        (sizes, file(&format!("{it}.u8")))
    });
    let pixels = all.each_ref().map(|(_, pixels)| &pixels[..]).concat();
    let mut rest = &pixels[..];
    for (index, of_bounds) in all.iter().flat_map(|(sizes, _)| sizes).enumerate() {
        for name in names() {
            let size = of_bounds.sizes[&name];
            let (wanted, tail) = rest.split_at(size[0] * size[1] * 3);
            rest = tail;
            let image = decoded(&file(&name)).expect(&name);
            let found = Picture::of(&image, size, Filter::Cubic);
            assert_eq!(found.size(), size);
            let error = worst(found.pixels(), wanted);
            println!("{name}, bounds {index}: {error}");
            // A cubic filter's weights come to more than one before those below zero are taken off.
            let most = match expected.files[&name].lossy {
                true => LOSSY + 2,
                false => 1,
            };
            assert!(error <= most, "{name}, bounds {index}: {error}");
        }
    }
    assert!(rest.is_empty());
}

#[derive(Deserialize)]
struct Cut {
    side: usize,
    resized: [usize; 2],
    stretched: [usize; 2],
    rows: usize,
    columns: usize,
    /// Which of the references has made them.
    by: Vec<String>,
}

#[test]
fn tiles_are_those_of_pillow_to_one_in_255() {
    let text = String::from_utf8(file("tiles.json")).expect("UTF-8");
    let cut: BTreeMap<String, Cut> = serde_json::from_str(&text).expect("valid JSON");
    let mut names: Vec<&String> = cut.keys().collect();
    names.sort_by_key(|name| text.find(&format!("\"{name}\"")));
    let pixels = file("tiles.u8");
    let mut rest = &pixels[..];
    for name in names {
        let Cut {
            side,
            resized,
            stretched,
            rows,
            columns,
            ref by,
        } = cut[name];
        let tiling = Tiling {
            resized,
            stretched: Some(stretched),
            side,
            seen: side,
            filter: Filter::Lanczos,
        };
        let image = decoded(&file(name)).expect(name);
        let pictures = tiling.pictures(&image);
        assert_eq!(pictures.len(), rows * columns + 1, "{name}");
        for reference in by {
            let differences = pictures.iter().map(|picture| {
                let (wanted, tail) = rest.split_at(side * side * 3);
                rest = tail;
                worst(picture.pixels(), wanted)
            });
            let most = differences.max();
            println!("{name}: {reference} {most:?}");
            // torchvision has weights of fewer bits, and rounds three times.
            let allowed = if reference == "Pillow" { 1 } else { 3 };
            assert!(most <= Some(allowed), "{name}: {reference}");
        }
    }
    assert!(rest.is_empty());
}

#[test]
fn a_file_that_claims_more_than_is_allowed_is_refused_by_its_header() {
    let small = Limits {
        bytes: 20 << 20,
        pixels: 100,
    };
    let refused = Header::read(&file("large.png"), &small);
    assert!(matches!(
        refused,
        Err(Error::TooManyPixels {
            width: 67,
            height: 41,
            limit: 100
        })
    ));
    // Ten kilobytes that say that they are 60,000 x 60,000.
    let mut huge = file("large.png");
    huge[16..20].copy_from_slice(&60_000u32.to_be_bytes());
    huge[20..24].copy_from_slice(&60_000u32.to_be_bytes());
    let crc = crc32(&huge[12..29]);
    huge[29..33].copy_from_slice(&crc.to_be_bytes());
    let refused = Header::read(&huge, &Limits::default());
    let Err(error @ Error::TooManyPixels { width: 60_000, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert!(error.to_string().contains("60000 x 60000"), "{error}");
    let short = Limits {
        bytes: 1000,
        ..Limits::default()
    };
    let refused = Header::read(&file("large.png"), &short);
    assert!(matches!(refused, Err(Error::TooManyBytes { .. })));
}

/// Of a PNG chunk.
fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 * (crc & 1));
        }
    }
    !crc
}

#[test]
fn other_files_are_told_from_images() {
    for other in [
        &b""[..],
        b"BM",
        b"%PDF-1.7",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    ] {
        let refused = Header::read(other, &Limits::default());
        assert!(matches!(refused, Err(Error::UnknownFormat)), "{refused:?}");
    }
    // What a file is called does not matter.
    let header = Header::read(&file("two.gif"), &Limits::default()).expect("an image");
    assert_eq!(header.format, Format::Gif);
}

#[test]
fn a_file_that_ends_too_early_is_damaged() {
    for name in ["large.png", "two.gif", "lossless.webp", "lossy.webp"] {
        let whole = file(name);
        for end in [whole.len() / 8, whole.len() / 2] {
            let refused = decoded(&whole[..end]);
            let Err(error @ Error::Damaged { .. }) = refused else {
                panic!("{name} until {end}: {refused:?}")
            };
            assert!(error.to_string().contains("damaged"), "{error}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is done to a file, it is an image of the size that its header says, or an error.
    #[test]
    fn damaged_files_are_images_or_errors(
        which in 0usize..13,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        end in any::<prop::sample::Index>(),
    ) {
        let mut bytes = file(&names()[which]);
        for (place, value) in changes {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        bytes.truncate(bytes.len() / 2 + end.index(bytes.len() / 2 + 1));
        let limits = Limits { bytes: 1 << 20, pixels: 1 << 16 };
        if let Ok(header) = Header::read(&bytes, &limits)
            && let Ok(image) = header.decode(&bytes)
        {
            let (width, height) = (header.width as usize, header.height as usize);
            let size = [image.width(), image.height()];
            prop_assert!(size == [width, height] || size == [height, width]);
            prop_assert_eq!(Picture::of(&image, [8; 2], Filter::Cubic).pixels().len(), 8 * 8 * 3);
        }
    }
}
