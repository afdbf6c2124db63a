// Pictures that go along with a message: decoded by the browser, and made as small as a model looks at them.
// What is sent is what is kept, so that a chat that is gone on with later shows the model the same.

import { bytes } from "./units.js";

// Longer than the side of any picture that an encoder takes; what is larger is made smaller by the server anyway.
const MOST_SIDE = 1024;
// A file of that size or less is taken as it is, if models' servers take its kind.
const MOST_KEPT_BYTES = 192 << 10;
const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
// Of a file before it is decoded: a page has no more memory than others.
const MOST_FILE_BYTES = 64 << 20;

/** A file that cannot be had, and why. */
export class FileError extends Error {}

/** Whether a file is a picture. One that is written as text is text. */
export function isPicture(file) {
  return file.type.startsWith("image/") && file.type !== "image/svg+xml";
}

/** The picture in a file: its name, and itself as a data URL. */
export async function read(file) {
  if (file.size > MOST_FILE_BYTES) throw new FileError(`${file.name} is larger than ${bytes(MOST_FILE_BYTES)}.`);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new FileError(`${file.name} is no picture that this browser can read.`);
  }
  const scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
  const kept = scale === 1 && file.size <= MOST_KEPT_BYTES && KINDS.includes(file.type);
  const url = kept ? await asItIs(file) : smaller(bitmap, scale);
  bitmap.close();
  return { name: file.name, url };
}

function asItIs(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new FileError(`${file.name} cannot be read.`)));
    reader.readAsDataURL(file);
  });
}

function smaller(bitmap, scale) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  // JPEG has no transparency.
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}
