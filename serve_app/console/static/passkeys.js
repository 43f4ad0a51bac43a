// Asks the browser for a passkey when a form with data-passkey is sent, and sends the answer with it.
"use strict";

const bytes = (text) => Uint8Array.from(atob(text.replace(/-/g, "+").replace(/_/g, "/")), (letter) => letter.charCodeAt(0));
const text = (buffer) => {
  let found = "";
  for (const one of new Uint8Array(buffer)) found += String.fromCharCode(one);
  return btoa(found).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
};

function options(form) {
  const found = JSON.parse(form.dataset.options);
  found.challenge = bytes(found.challenge);
  if (found.user) found.user.id = bytes(found.user.id);
  for (const list of [found.excludeCredentials, found.allowCredentials]) {
    for (const one of list || []) one.id = bytes(one.id);
  }
  return found;
}

function answer(credential) {
  const response = {};
  for (const name of ["clientDataJSON", "attestationObject", "authenticatorData", "signature", "userHandle"]) {
    if (credential.response[name]) response[name] = text(credential.response[name]);
  }
  return JSON.stringify({ id: credential.id, rawId: text(credential.rawId), type: credential.type, response });
}

for (const form of document.querySelectorAll("form[data-passkey]")) {
  if (!window.PublicKeyCredential) continue;
  form.hidden = false;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const problem = form.querySelector("[data-passkey-error]");
    problem.hidden = true;
    try {
      const asked = { publicKey: options(form) };
      const found = await navigator.credentials[form.dataset.passkey](asked);
      form.elements.credential.value = answer(found);
      form.submit();
    } catch (error) {
      problem.textContent = error.name === "InvalidStateError"
        ? "This device has a passkey for your login already."
        : "No passkey was used. Try again, or use another way.";
      problem.hidden = false;
    }
  });
}
