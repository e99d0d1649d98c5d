// Unpacks the blocks that `verl_mt/extensions/inspection/report/token_columns.py` describes.
"use strict";

const Codec = (() => {
  const halves = new Float32Array(65536); // every float16 as the number it stands for
  for (let bits = 0; bits < 65536; bits++) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 31) halves[bits] = fraction ? NaN : sign * Infinity;
    else if (exponent) halves[bits] = sign * 2 ** (exponent - 15) * (1 + fraction / 1024);
    else halves[bits] = sign * 2 ** -24 * fraction;
  }

  function fromBase64(text) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const binary = atob(text);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    return bytes;
  }

  async function gunzip(bytes) {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  const text = (bytes) => new TextDecoder().decode(bytes);

  // The columns of a part: {ids, flags, place, sampler, drift, advantage, version, clip}. `place[t]` is where token t
  // stands in the columns that only numbered tokens have, -1 if it has no numbers.
  function tokens(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const n = view.getUint32(0, true);
    const m = view.getUint32(4, true);
    let at = 8;
    const take = (count, width) => {
      const whole = new Uint32Array(count);
      for (let plane = 0; plane < width; plane++, at += count) {
        for (let i = 0; i < count; i++) whole[i] |= bytes[at + i] << (8 * plane);
      }
      return whole;
    };
    const half = (count) => Float32Array.from(take(count, 2), (bits) => halves[bits]);
    const ids = take(n, 3);
    const flags = take(n, 1);
    const place = new Int32Array(n).fill(-1);
    for (let t = 0, next = 0; t < n; t++) if (flags[t] & 3) place[t] = next++;
    return {
      ids, flags, place,
      sampler: half(m), drift: half(m), advantage: half(m),
      version: Int32Array.from(take(m, 4)), clip: take(m, 1),
    };
  }

  return { fromBase64, gunzip, text, tokens };
})();
