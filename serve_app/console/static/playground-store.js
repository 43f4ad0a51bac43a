// Keeps the playground across reloads, in this tab only, and packs a conversation into a link.
// The part of a link after "#" is never sent to the service, so no conversation is stored there.

const MAX_LINK_BYTES = 32 * 1024;

export class Store {
  constructor(name) {
    this.name = name;
  }

  load() {
    try {
      return JSON.parse(sessionStorage.getItem(this.name));
    } catch {
      return null;
    }
  }

  save(state) {
    try {
      sessionStorage.setItem(this.name, JSON.stringify(state));
    } catch {
      sessionStorage.removeItem(this.name); // the tab's storage is full
    }
  }
}

async function piped(bytes, stream) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());
}

// Returns a link to this page with the conversation in it.
export async function linkTo(state) {
  const packed = await piped(new TextEncoder().encode(JSON.stringify(state)), new CompressionStream("deflate-raw"));
  if (packed.length > MAX_LINK_BYTES) throw new Error("The conversation is too long for a link.");
  let text = "";
  for (const byte of packed) text += String.fromCharCode(byte);
  const encoded = btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return `${location.origin}${location.pathname}#shared=${encoded}`;
}

// Returns the conversation of a link, or null.
export async function shared(hash) {
  if (!hash.startsWith("#shared=")) return null;
  try {
    const text = atob(hash.slice(8).replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(text, (one) => one.charCodeAt(0));
    return JSON.parse(new TextDecoder().decode(await piped(bytes, new DecompressionStream("deflate-raw"))));
  } catch {
    return null;
  }
}
